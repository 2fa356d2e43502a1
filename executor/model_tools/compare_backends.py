"""`dflow compare-backends`: whether both capture backends give the same states, to be known before a long training.

The computation is a process of its own (ops/capture_targets/compare.py), because this one must not load torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError, DflowError, Mistake, PipelineError, StoreError, did_you_mean
from dsl.graph import Graph
from dsl.graph_json import graph_to_json
from dsl.threads import useful_threads
from executor.launchers.stage_process import stage_environment
from executor.planning.session import make_planner
from executor.store.artifact_store import Store
from executor.system.jsonlines import read_json, write_json
from executor.system.resource_pool import threads_of

CAPTURE = "capture_targets"
ENTRY = "ops.capture_targets.compare"
LOG_LINES = 20


@frozen
class Compared:
    """What the process said of a capture node; the JSON values that ops/capture_targets/compare.py lays down."""

    result: Mapping[str, Any]

    @property
    def agree(self) -> bool:
        return bool(self.result["agree"])

    def lines(self) -> str:
        """For a user: how far the states lie apart, layer by layer, and a plain verdict last."""
        result = self.result
        tokens = sum(sample["tokens"] for sample in result["samples"])
        images = sum(sample["images"] for sample in result["samples"])
        versions = result["backends"]
        lines = [
            f"{result['node']}: {len(result['samples'])} samples, {tokens:,} tokens, {images} images, on the "
            f"{result['device']}; transformers {versions['huggingface']} against SGLang {versions['sglang']}"
        ]
        for part in result["dtypes"]:
            lines += ["", f"{part['dtype']}: differences of the states, relative to a token's own", _HEADER]
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
            told = json.dumps({"image": result["image_bounds"]})
            lines.append(
                "the tokens have other image sizes than the target's own: a server needs "
                f"--mm-process-config '{told}', which `dflow serve` passes"
            )
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        if self.agree:
            return "The backends agree: what remains is rounding."
        states = any(
            not row["agrees"] for part in self.result["dtypes"] for row in [*part["states"], part["log_probs"]]
        )
        if states:
            return (
                "THE BACKENDS DISAGREE: a draft trained on one of them would be served features of the other. Do not "
                "train on this; see docs/sglang.md"
            )
        return (
            "THE BACKENDS AGREE, BUT SGLANG PREPARES THE SAMPLES OTHERWISE: the served target would see other tokens "
            "or pixels than the draft was trained on; see docs/sglang.md"
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
    lines = [f"preprocessing: SGLang makes the same tokens and pixels of {len(rows) - len(different)} of {len(rows)}"]
    return lines + [f"  {row['id']}: {'; '.join(row['differences'])}" for row in different]


def compare(store: Store, graph: Graph, node_id: str | None, samples: int) -> list[Compared]:
    """Each capture node of a graph (or the one that is named), compared on a few of its samples.

    Raises DataError where SGLang is missing or another version, PipelineError where there is no such node, and
    StoreError where its tokens or its target are not in the store.
    """
    if samples < 1:
        raise PipelineError([Mistake(f"--samples {samples}: give one or more")])
    from ops.lib.sglang.version import require_sglang  # here: the command checks first whose `ops` this is

    require_sglang("dflow compare-backends")
    nodes = _capture_nodes(graph, node_id)
    decisions = make_planner(store, graph).plan()
    made = {name: decision.digest for name, decision in decisions.items() if decision.cache == "hit"}
    for name in nodes:
        missing = [parent for parent in graph.nodes[name].parents if parent not in made]
        if missing:
            raise StoreError(
                f"{name} reads from {' and '.join(missing)}, not in {store.path} for the pipeline as it is: "
                f"`dflow run` with the same file and -s makes them; stop it (Ctrl-C) when {name} has begun"
            )
    artifacts = {name: [str(store.object_path(digest)), digest] for name, digest in made.items() if digest is not None}
    return [Compared(run_comparison(graph, name, artifacts, samples)) for name in nodes]


def _capture_nodes(graph: Graph, node_id: str | None) -> list[str]:
    captures = [name for name, node in graph.nodes.items() if node.op.name == CAPTURE]
    if node_id is None and captures:
        return captures
    if node_id in captures:
        return [node_id] if node_id is not None else []
    if node_id is None:
        raise PipelineError([Mistake(f"there is no {CAPTURE} node in {graph.name}: nothing to compare")])
    hint = did_you_mean(node_id, captures) or f"{CAPTURE} nodes: {', '.join(captures) or 'none'}"
    raise PipelineError([Mistake(f'"{node_id}" is no {CAPTURE} node', hint=hint)])


def run_comparison(
    graph: Graph, node_id: str, artifacts: Mapping[str, Sequence[str]], samples: int
) -> Mapping[str, Any]:
    """The process, and what it wrote. Raises DataError where it refused, DflowError where it broke down."""
    with tempfile.TemporaryDirectory(prefix="dflow-compare-") as folder:
        request, result, log = (Path(folder) / name for name in ("request.json", "result.json", "log"))
        told = {"graph": graph_to_json(graph), "node": node_id, "artifacts": dict(artifacts), "samples": samples}
        write_json(request, told)
        with log.open("wb") as output:
            command = [sys.executable, "-m", ENTRY, str(request), str(result)]
            node = graph.nodes[node_id]
            useful = useful_threads(node, {name: Path(path) for name, (path, _) in artifacts.items()})
            environment = stage_environment(threads_of(node.launch, useful=useful))
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
            ).returncode
        said: Mapping[str, Any] | None = read_json(result)
        if said is None:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            raise DflowError("\n  ".join([f"{node_id}: the comparison ended with exit code {code}:", *tail]))
    if "error" in said:
        raise DataError(f"{node_id}: {said['error']}")
    return said
