"""Capture with batches by token budget against one sample at a time: tokens per second of the same shards.

    python benchmarks/capture.py                                   # short samples on a small Qwen3-VL, one thread
    python benchmarks/capture.py --hidden 512 --tokens 64 256 --rounds 9 --json figures.json
    python benchmarks/capture.py --sglang CHECKPOINT               # SGLang's capture: benchmarks/capture_engine.py

Both sides run `capture_shard` on the same shard of tokens: reading, forward pass, writing. Each kind of samples (text,
one image each, half and half) has its own shard. A round runs both sides once, the other one first in the next round;
the ratio is the median of the rounds' ratios. Before that, both sides' features are compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import frozen
from safetensors.torch import load_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.rounds import table
from dsl.op import Ref
from ops.artifacts import TokenShards
from ops.capture_targets.backend import default_batch_tokens
from ops.capture_targets.huggingface import HuggingFaceBackend
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_shard, plan_shards
from ops.capture_targets.writing import Shard
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader, TokenSample, write_token_shard
from ops.lib.target.model import Target

GOAL = 3.0
KINDS = {"text": (False,), "image": (True,), "mixed": (False, True)}
VOCABULARY, IMAGE_TOKEN, PATCH, MERGE = 2048, 5, 4, 2
PATCH_DIM, GRID = 3 * 2 * PATCH**2, (1, 4, 4)  # 16 x 16 pixels: 16 patches, 4 tokens
FIRST_TEXT_ID = 8  # below stand the ids of images
ONE_BY_ONE = 1  # a budget of one token takes one sample at least


@frozen
class Shapes:
    """What random samples of a target look like: its vocabulary, and its images."""

    vocabulary: int = VOCABULARY
    vision_start_id: int = IMAGE_TOKEN + 1
    image_token_id: int = IMAGE_TOKEN
    patch_dim: int = PATCH_DIM
    merge_size: int = MERGE
    grid: tuple[int, int, int] = GRID


@frozen
class Sides:
    """Tokens per second of each round."""

    batched: list[float]
    single: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(ours / other for ours, other in zip(self.batched, self.single, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["--sglang"]:  # SGLang is not always installed
        return int(importlib.import_module("benchmarks.capture_engine").main(given[1:]))
    arguments = _arguments(given)
    torch.set_num_threads(arguments.threads)
    target = small_target(arguments.hidden, arguments.layers)
    figures, rows = (
        {},
        [("samples", "tokens/s batched", "tokens/s one by one", "ratio", f"goal >= {GOAL:g}", "max abs difference")],
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, images in KINDS.items():
            samples = make_samples(arguments.samples, arguments.tokens, images)
            reader = write_tokens(Path(folder) / kind, samples)
            sides, difference = measure(target, reader, arguments.batch_tokens, arguments.rounds, Path(folder))
            figures[kind] = {"batched": sides.batched, "single": sides.single, "ratio": sides.ratio}
            figures[kind]["difference"] = difference
            speeds = [f"{statistics.median(values):,.0f}" for values in (sides.batched, sides.single)]
            goal = "holds" if sides.ratio >= GOAL else "missed"
            rows.append((kind, *speeds, f"{sides.ratio:.2f}", goal, f"{difference:.1e}"))
    print(table(rows))
    print(f"{arguments.threads} threads, {arguments.rounds} rounds")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256, help="samples of each kind")
    parser.add_argument("--tokens", type=int, nargs=2, default=(16, 48), help="shortest and longest sample")
    parser.add_argument("--batch-tokens", type=int, help="the budget; the op's own unless given")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the target; the built-in one's")
    parser.add_argument("--layers", type=int, default=8, help="and its number of layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    return parser.parse_args(argv)


def small_target(hidden: int, layers: int) -> Target:
    """A Qwen3-VL with random weights and deepstack."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": max(1, hidden // 32),
            "num_key_value_heads": max(1, hidden // 64),
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,  # transformers does it anyway; SGLang asks
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": hidden,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=True,
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=IMAGE_TOKEN + 1,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).eval().requires_grad_(False)
    return Target(model, {"hidden_size": hidden, "num_layers": layers}, torch.device("cpu"))


def make_samples(
    count: int, lengths: Sequence[int], images: Sequence[bool], shapes: Shapes | None = None
) -> list[TokenSample]:
    """Random tokens of lengths between the two; where `images` says so by turns, an image stands in front."""
    shapes = shapes or Shapes()
    generator = torch.Generator().manual_seed(1)
    shortest, longest = lengths
    samples = []
    for index in range(count):
        shown = images[index % len(images)]
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(FIRST_TEXT_ID, shapes.vocabulary, (length,), generator=generator)
        rows = shapes.grid[0] * shapes.grid[1] * shapes.grid[2] if shown else 0
        if shown:
            ids[0] = shapes.vision_start_id
        ids[1 : 1 + rows // shapes.merge_size**2] = shapes.image_token_id
        samples.append(
            TokenSample(
                id=str(index),
                category="image" if shown else "text",
                input_ids=ids,
                loss_mask=torch.ones(length, dtype=torch.bool),
                pixel_values=torch.randn(rows, shapes.patch_dim, generator=generator),
                image_grid_thw=torch.tensor([shapes.grid] if shown else [], dtype=torch.int64).reshape(-1, 3),
                prompt_tokens=1,
            )
        )
    return samples


def write_tokens(folder: Path, samples: Sequence[TokenSample]) -> TokenReader:
    """The parts of a TokenShards artifact that capture reads."""
    folder.mkdir()
    shard = "train-00000.safetensors"
    write_token_shard(folder / shard, samples, PATCH_DIM)
    write_json(folder / "tokens.json", {})
    rows = [
        {
            "id": sample.id,
            "split": "train",
            "category": sample.category,
            "shard": shard,
            "row": row,
            "tokens": len(sample.input_ids),
            "prompt_tokens": sample.prompt_tokens,
        }
        for row, sample in enumerate(samples)
    ]
    write_jsonl(folder / "samples.jsonl", rows)
    return TokenReader(TokenShards(folder, "benchmark"), "train")


def measure(
    target: Target, reader: TokenReader, batch_tokens: int | None, rounds: int, folder: Path
) -> tuple[Sides, float]:
    """The speeds of all rounds, and how far the features of the two sides are apart."""
    layer_ids = tuple(range(1, target.num_layers - 2))[:5]
    (plan,) = plan_shards("train", reader, sum(record["tokens"] for record in reader.records))
    config, backend = CaptureTargets(tokens=Ref("tokens"), target=Ref("target")), HuggingFaceBackend(target)

    def run(name: str, budget: int) -> float:
        start = time.perf_counter()
        shard = Shard([record["tokens"] for record in reader.records], getattr(torch, config.dtype))
        capture_shard(shard, plan, backend, reader, layer_ids, config, budget)
        shard.write(folder / name)
        return plan.tokens / (time.perf_counter() - start)

    budgets = {
        "batched.safetensors": batch_tokens or default_batch_tokens(target.device.type),
        "single.safetensors": ONE_BY_ONE,
    }
    for name, budget in budgets.items():  # warm up
        run(name, budget)
    ours, theirs = (load_file(folder / name)["features"] for name in budgets)
    difference = float((ours - theirs).abs().max())
    speeds: dict[str, list[float]] = {name: [] for name in budgets}
    for index in range(rounds):
        for name in sorted(budgets, reverse=index % 2 == 1):
            speeds[name].append(run(name, budgets[name]))
    return Sides(*speeds.values()), difference


if __name__ == "__main__":
    raise SystemExit(main())
