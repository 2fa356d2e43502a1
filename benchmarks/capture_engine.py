"""Tokens per second of a capture by SGLang, of the engine's plain prefill of the same prompts, and of transformers.

    python benchmarks/capture.py --sglang CHECKPOINT               # on a GPU: a real target, in bfloat16
    python benchmarks/capture.py --sglang --tokens 16 48 --grid 4 4 --dtype float32     # a small random Qwen3-VL

The plain prefill runs the same requests in the same batches through the same model runner, without keeping or copying
states; the capture also copies them to the CPU. A round runs both once, in alternating order; the
ratio is the median of the rounds' ratios. transformers captures the same batches afterwards, when SGLang's memory is
free again. The states of both backends are compared, relative to their size.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.capture import FIRST_TEXT_ID, KINDS, Shapes, make_samples, small_target
from benchmarks.harness import in_rounds, median_ratio, parser, save_figures, table, verdict
from ops.capture_targets.backend import forward_batch
from ops.capture_targets.layers import spread_layers
from ops.lib.data.batching import batches_by_length
from ops.lib.data.token_shards import TokenSample
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.model import Target
from ops.lib.vision.families import Family, VisionFamily, family_of

GOAL = 0.9  # of the plain prefill's speed

Batches = Sequence[Sequence[TokenSample]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(folder)
            small_target(hidden=128, layers=8).model.save_pretrained(checkpoint)
        figures = measure(checkpoint, device, arguments)
    header = ("samples", "capture, tokens/s", "plain prefill", "ratio", f"goal >= {GOAL:g}", "transformers", "ratio")
    rows = [(*header, "difference")]
    for kind, found in figures.items():
        speeds = {side: f"{statistics.median(found[side]):,.0f}" for side in ("capture", "prefill", "transformers")}
        capture, prefill = [speeds["capture"], speeds["prefill"]], f"{found['of_prefill']:.2f}"
        ours = [speeds["transformers"], f"{found['of_transformers']:.2f}", f"{found['difference']:.1e}"]
        rows.append((kind, *capture, prefill, verdict(found["of_prefill"] >= GOAL), *ours))
    print(table(rows))
    print(f"{device}, {arguments.dtype}, {arguments.rounds} rounds of {arguments.samples} samples")
    save_figures(arguments.json, figures)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, rounds=5)
    options.add_argument("checkpoint", nargs="?", type=Path, help="a checkpoint directory; default: a small random one")
    options.add_argument("--samples", type=int, default=256, help="samples of each kind")
    options.add_argument("--tokens", type=int, nargs=2, default=(256, 2048), help="shortest and longest sample")
    options.add_argument("--grid", type=int, nargs=2, default=(32, 32), help="patches of an image, down and across")
    options.add_argument("--batch-tokens", type=int, default=16384)
    options.add_argument("--layers", type=int, default=5, help="number of captured layers")
    options.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options.add_argument("--threads", type=int, default=1)
    return options.parse_args(argv)


def measure(checkpoint: Path, device: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure tokens per second of each side in every round, for each kind of samples that the target supports."""
    family = family_of(AutoConfig.from_pretrained(checkpoint).to_dict())
    layer_ids = spread_layers(family.text_config["num_hidden_layers"], arguments.layers)
    shapes = shapes_of(family, arguments.grid)
    batches = {
        kind: in_batches(make_samples(arguments.samples, arguments.tokens, images, shapes), arguments.batch_tokens)
        for kind, images in KINDS.items()
        if isinstance(family, VisionFamily) or not any(images)
    }
    figures: dict[str, dict[str, Any]] = {}
    states: dict[str, list[Tensor]] = {}
    with SglangRuntime.start(
        checkpoint,
        device=device,
        dtype=arguments.dtype,
        pool_tokens=arguments.batch_tokens,
        context_length=arguments.tokens[1],
    ) as runtime:
        capture = partial(runtime.capture, layer_ids=layer_ids)
        for kind, parts in batches.items():
            states[kind] = capture(parts[0])
            runtime.prefill(parts[0])
            figures[kind] = {**speeds_of({"capture": capture, "prefill": runtime.prefill}, parts, arguments.rounds)}
    target = Target.from_directory(checkpoint, {}, device, getattr(torch, arguments.dtype))
    for kind, parts in batches.items():
        features_BSF, _ = forward_batch(target, parts[0], layer_ids)
        pairs = [(features_BSF[row, : len(served)], served) for row, served in enumerate(states[kind])]
        figures[kind]["difference"] = max(float((a - b).norm() / a.norm()) for a, b in pairs)
        ours = partial(forward_batch, target, layer_ids=layer_ids)
        figures[kind] |= speeds_of({"transformers": ours}, parts, arguments.rounds)
        figures[kind]["of_prefill"] = median_ratio(figures[kind]["capture"], figures[kind]["prefill"])
        figures[kind]["of_transformers"] = median_ratio(figures[kind]["capture"], figures[kind]["transformers"])
    return figures


def in_batches(samples: Sequence[TokenSample], batch_tokens: int) -> list[list[TokenSample]]:
    lengths = [len(sample.input_ids) for sample in samples]
    return [[samples[row] for row in rows] for rows in batches_by_length(lengths, batch_tokens)]


def speeds_of(
    sides: dict[str, Callable[[Sequence[TokenSample]], object]], batches: Batches, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second of each side, one value per round."""
    tokens = sum(len(sample.input_ids) for part in batches for sample in part)

    def run(side: Callable[[Sequence[TokenSample]], object]) -> float:
        start = time.perf_counter()
        for part in batches:
            side(part)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return tokens / (time.perf_counter() - start)

    return in_rounds({name: partial(run, side) for name, side in sides.items()}, rounds)


def shapes_of(family: Family, grid: Sequence[int]) -> Shapes:
    """The shapes of random samples for a target of this family. grid: height and width of an image in patches."""
    vocabulary = int(family.text_config["vocab_size"])
    if not isinstance(family, VisionFamily):
        return Shapes(vocabulary=vocabulary)
    special = (family.image_token_id, family.config["vision_start_token_id"])
    return Shapes(
        vocabulary=vocabulary if min(special) < FIRST_TEXT_ID else min(special),  # no text id is that of an image
        vision_start_id=family.config["vision_start_token_id"],
        image_token_id=family.image_token_id,
        patch_dim=family.patch_dim,
        merge_size=family.merge_size,
        grid=(1, grid[0], grid[1]),
    )


if __name__ == "__main__":
    raise SystemExit(main())
