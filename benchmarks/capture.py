"""Capture with batches by token budget against one sample at a time: tokens per second of the same shards.

    python benchmarks/capture.py                                   # short samples on a small Qwen3-VL, one thread
    python benchmarks/capture.py --hidden 512 --tokens 64 256 --rounds 9 --json figures.json
    python benchmarks/capture.py --sglang CHECKPOINT               # SGLang's capture: benchmarks/capture_engine.py

Both sides run `capture_shard` on the same shard of tokens: reading, forward pass, writing. Each kind of samples (text,
one image each, half and half) has its own shard. A round runs both sides once, in alternating order;
the ratio is the median of the rounds' ratios. Before that, both sides' features are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import load_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.harness import in_rounds, median_ratio, parser, save_figures, table, verdict
from dsl.op import Ref
from ops.artifacts import TokenShards
from ops.capture_targets.backend import HuggingFaceBackend
from ops.capture_targets.op import CaptureTargets, default_batch_tokens
from ops.capture_targets.run import capture_shard, plan_shards
from ops.capture_targets.writing import Shard
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader, TokenSample, write_token_shard
from ops.lib.target.model import Target

GOAL = 3.0
KINDS = {"text": (False,), "image": (True,), "mixed": (False, True)}
VOCABULARY, IMAGE_TOKEN, PATCH, MERGE = 2048, 5, 4, 2
PATCH_DIM, GRID = 3 * 2 * PATCH**2, (1, 4, 4)  # 16 x 16 pixels: 16 patches, 4 tokens
FIRST_TEXT_ID = 8  # lower ids are those of images
ONE_BY_ONE = 1  # a budget of one token: every batch has one sample


@frozen
class Shapes:
    """The shapes of random samples for a target: the size of its vocabulary, and its images."""

    vocabulary: int = VOCABULARY
    vision_start_id: int = IMAGE_TOKEN + 1
    image_token_id: int = IMAGE_TOKEN
    patch_dim: int = PATCH_DIM
    merge_size: int = MERGE
    grid: tuple[int, int, int] = GRID


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == ["--sglang"]:
        from benchmarks import capture_engine  # SGLang is not always installed

        return capture_engine.main(argv[1:])
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    target = small_target(arguments.hidden, arguments.layers)
    head = ("samples", "tokens/s batched", "tokens/s one by one", "ratio", f"goal >= {GOAL:g}", "max abs difference")
    figures, rows = {}, [head]
    with tempfile.TemporaryDirectory() as folder:
        for kind, images in KINDS.items():
            samples = make_samples(arguments.samples, arguments.tokens, images)
            reader = write_tokens(Path(folder) / kind, samples)
            figures[kind] = found = measure(target, reader, arguments.batch_tokens, arguments.rounds, Path(folder))
            speeds = [f"{statistics.median(found[side]):,.0f}" for side in ("batched", "single")]
            ratio, difference = f"{found['ratio']:.2f}", f"{found['difference']:.1e}"
            rows.append((kind, *speeds, ratio, verdict(found["ratio"] >= GOAL), difference))
    print(table(rows))
    print(f"{arguments.threads} threads, {arguments.rounds} rounds")
    save_figures(arguments.json, figures)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser(__doc__, rounds=5)
    options.add_argument("--samples", type=int, default=256, help="samples of each kind")
    options.add_argument("--tokens", type=int, nargs=2, default=(16, 48), help="shortest and longest sample")
    options.add_argument("--batch-tokens", type=int, help="the budget; default: that of the op")
    options.add_argument("--hidden", type=int, default=128, help="hidden size of the target")
    options.add_argument("--layers", type=int, default=8, help="and its number of layers")
    options.add_argument("--threads", type=int, default=1)
    return options.parse_args(argv)


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
                "mrope_interleaved": True,  # transformers always does it; SGLang requires it
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
    """Make random samples, with lengths between the two given.

    images: whether a sample begins with an image; the list is repeated over the samples.
    """
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
    """Write samples as a token shard, with what capture reads of a TokenShards artifact; returns a reader of it."""
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


def measure(target: Target, reader: TokenReader, batch_tokens: int | None, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure both sides: tokens per second in each round, their ratio, and the largest difference of their
    features.
    """
    layer_ids = tuple(range(1, target.num_layers - 2))[:5]
    (plan,) = plan_shards("train", reader, sum(record["tokens"] for record in reader.records))
    config, backend = CaptureTargets(tokens=Ref("tokens"), target=Ref("target")), HuggingFaceBackend(target)

    def run(name: str, budget: int) -> float:
        start = time.perf_counter()
        shard = Shard([record["tokens"] for record in reader.records], getattr(torch, config.dtype), layer_ids)
        capture_shard(shard, plan, backend, reader, layer_ids, config, budget)
        shard.write(folder / name)
        return plan.tokens / (time.perf_counter() - start)

    budgets = {"batched": batch_tokens or default_batch_tokens(target.device.type), "single": ONE_BY_ONE}
    sides = {name: partial(run, name, budget) for name, budget in budgets.items()}
    in_rounds(sides, 1)  # warm up
    ours, theirs = (load_file(folder / name)["features"] for name in sides)
    speeds = in_rounds(sides, rounds)
    return {**speeds, "ratio": median_ratio(*speeds.values()), "difference": float((ours - theirs).abs().max())}


if __name__ == "__main__":
    raise SystemExit(main())
