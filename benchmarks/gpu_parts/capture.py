"""Tokens per second of a capture by transformers of a random target of 8B shape, made on the device; or by SGLang.

The time is that of all work of `capture_targets` on its shards: reading tokens, forward passes, and a thread that
writes each shard while the next is captured, into a folder in memory if there is one, so that no disk is timed. With
--sglang the config of the same target is in a folder, and SGLang uses random weights (load_format "dummy"); its capture
and its plain prefill are timed as in benchmarks/capture_engine.py.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.capture import Shapes, make_samples, write_tokens
from benchmarks.gpu_parts.timing import answer, draft_sizes, part_parser, peak_mib, spread
from benchmarks.sides.qwen3 import qwen3_config
from dsl.op import Ref
from ops.capture_targets.backend import HuggingFaceBackend
from ops.capture_targets.layers import spread_layers
from ops.capture_targets.op import CaptureTargets, default_batch_tokens
from ops.capture_targets.run import PARTS_THAT_FILL, capture_shard, plan_shards
from ops.capture_targets.writing import Shard
from ops.lib.data.background_writer import BackgroundWriter
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.model import Target

TARGET_LAYERS = {True: 6, False: 36}  # of the target, tiny and full; its other sizes are its draft's
COUNT, LENGTHS = {True: 6, False: 48}, {True: (8, 24), False: (256, 2048)}  # of samples
IN_MEMORY = Path("/dev/shm")
SHARDS = 4
POOL = 16384  # tokens of SGLang's


def main() -> None:
    options = part_parser(__doc__)
    options.add_argument("--sglang", action="store_true")
    arguments = options.parse_args()
    needed = COUNT[arguments.tiny] * LENGTHS[arguments.tiny][1] * draft_sizes(arguments.tiny).features * 2
    with tempfile.TemporaryDirectory(dir=memory_folder(needed)) as folder:
        run = by_sglang if arguments.sglang else by_transformers
        answer(run(arguments.device, arguments.tiny, Path(folder)))


def memory_folder(size: int) -> Path | None:
    """A folder in memory with room for twice `size` bytes; None if there is none, so that the disk is used."""
    return IN_MEMORY if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 2 * size else None


def by_transformers(device: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Measure the capture by transformers: tokens per second and gigabytes written in each round, after a warm-up."""
    target = random_target(target_config(tiny), torch.device(device))
    samples, layer_ids = samples_of(tiny), spread_layers(target.num_layers, draft_sizes(tiny).target_layers)
    reader = write_tokens(folder / "tokens", samples)
    tokens = sum(record["tokens"] for record in reader.records)
    plans = plan_shards("train", reader, -(-tokens // SHARDS))
    config = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), dtype="bfloat16")
    backend, budget = HuggingFaceBackend(target), default_batch_tokens(device)
    filled = budget // PARTS_THAT_FILL if device == "cuda" else budget

    def capture() -> float:
        started = time.perf_counter()
        with BackgroundWriter("shards") as writer:
            for plan in plans:
                lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
                shard = Shard(lengths, torch.bfloat16, layer_ids)
                capture_shard(shard, plan, backend, reader, layer_ids, config, budget, filled)
                writer.start(plan.file, shard.write, folder / plan.file)
        return time.perf_counter() - started

    memory = peak_mib(capture, target.device)
    seconds = [capture() for _ in range(2 if tiny else 3)]
    return {
        "tokens": tokens,
        "samples": len(samples),
        "layers": len(layer_ids),
        "parameters": sum(weight.numel() for weight in target.model.parameters()),
        "shards": len(plans),
        "written_gb": sum((folder / plan.file).stat().st_size for plan in plans) / 1e9,
        "in_memory": folder.is_relative_to(IN_MEMORY),
        "seconds": spread(seconds),
        "tokens_per_second": spread([tokens / each for each in seconds]),
        "mib": memory,
    }


def target_config(tiny: bool) -> Qwen3Config:
    """The config of the target for which the benchmarks' draft is made. tiny: with few layers."""
    sizes = replace(draft_sizes(tiny), layers=TARGET_LAYERS[tiny])
    return qwen3_config(sizes, "sdpa", tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])


def samples_of(tiny: bool) -> list[TokenSample]:
    return make_samples(COUNT[tiny], LENGTHS[tiny], (False,), Shapes(vocabulary=draft_sizes(tiny).vocabulary))


def random_target(config: Qwen3Config, device: torch.device) -> Target:
    """A Qwen3 target with random bfloat16 weights, made on the device: nothing is loaded or copied."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    info = {"hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers}
    return Target(model.eval().requires_grad_(False), info, device)


def by_sglang(device: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Measure SGLang's capture and its plain prefill of the same batches: tokens per second in each round."""
    from benchmarks.capture_engine import in_batches, speeds_of  # SGLang is not always installed
    from ops.lib.sglang.runtime import SglangRuntime

    config = target_config(tiny)
    config.save_pretrained(folder)
    batches = in_batches(samples_of(tiny), POOL)
    layer_ids = spread_layers(config.num_hidden_layers, draft_sizes(tiny).target_layers)
    with SglangRuntime.start(
        folder,
        device=device,
        dtype="bfloat16",
        pool_tokens=POOL,
        context_length=LENGTHS[tiny][1],
        server_args={"load_format": "dummy"},
    ) as served:
        sides = {"capture": partial(served.capture, layer_ids=layer_ids), "prefill": served.prefill}
        speeds_of(sides, batches, 1)
        speeds = speeds_of(sides, batches, 2 if tiny else 3)
    return {name: spread(values) for name, values in speeds.items()}


if __name__ == "__main__":
    main()
