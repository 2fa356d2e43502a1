"""Output of `dflow doctor --backends` for a capture node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def comparison_text(result: Mapping[str, Any]) -> str:
    """The comparison as text: how far the states differ in each layer, and the verdict last.

    result: the JSON values that ops/tools/compare_backends/run.py writes.
    """
    tokens = sum(sample["tokens"] for sample in result["samples"])
    images = sum(sample["images"] for sample in result["samples"])
    versions = result["backends"]
    lines = [
        f"{result['node']}: {len(result['samples'])} samples, {tokens:,} tokens, {images} images, on the "
        f"{result['device']}; transformers {versions['huggingface']} against SGLang {versions['sglang']}"
    ]
    for part in result["dtypes"]:
        lines += [
            "",
            f"{part['dtype']}: differences of the states, relative to the norm of each token's state",
            _HEADER,
        ]
        lines += [_state_line(row) for row in part["states"]]
        logs = part["log_probs"]
        lines.append(
            f"log-probabilities of the answers differ by up to {logs['largest']:.1e}, allowed {logs['allowed']:.1e}"
            f"{'' if logs['agrees'] else '  TOO FAR'}"
        )
    if result["left_out"]:
        lines += ["", f"float32 is not compared: {result['left_out']}"]
    lines += ["", *_preprocessing_lines(result["preprocessing"])]
    if result["image_bounds"]:
        config = json.dumps({"image": result["image_bounds"]})
        lines.append(
            "the tokens use other image sizes than the target's defaults: a server needs "
            f"--mm-process-config '{config}', which `dflow serve` passes"
        )
    return "\n".join([*lines, _verdict(result)])


def _verdict(result: Mapping[str, Any]) -> str:
    if result["agree"]:
        return "The backends agree: what remains is rounding."
    states = any(not row["agrees"] for part in result["dtypes"] for row in [*part["states"], part["log_probs"]])
    if states:
        return (
            "THE BACKENDS DISAGREE: a draft trained on one of them would be served features of the other. Do not "
            "train on this; see docs/sglang.md"
        )
    return (
        "THE BACKENDS AGREE, BUT SGLANG PREPROCESSES THE SAMPLES DIFFERENTLY: the served target would see other "
        "tokens or pixels than the draft was trained on; see docs/sglang.md"
    )


_HEADER = f"{'layer':>5}  {'tokens':6}  {'largest':>9}  {'relative':>9}  {'allowed':>9}  at"


def _state_line(row: Mapping[str, Any]) -> str:
    line = (
        f"{row['layer']:>5}  {row['kind']:6}  {row['absolute']:9.1e}  {row['relative']:9.1e}  {row['allowed']:9.1e}  "
        f"{row['sample']}, token {row['position']}"
    )
    return line if row["agrees"] else f"{line}  TOO FAR"


def _preprocessing_lines(rows: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if rows is None:
        return ["preprocessing: not compared, the messages of the tokens are no longer in the store"]
    different = [row for row in rows if row["differences"]]
    if not rows:
        return []
    lines = [f"preprocessing: same tokens and pixels in SGLang for {len(rows) - len(different)} of {len(rows)}"]
    return lines + [f"  {row['id']}: {'; '.join(row['differences'])}" for row in different]
