"""Tokens per second of a capture by transformers of a random target of 8B shape, made on the device; or by SGLang.

The time is that of all work of `capture_targets` on its shards: reading tokens, forward passes, and a thread that
writes each shard while the next is captured. With --sglang the config of the same target is in a folder, and SGLang
uses random weights (load_format "dummy"); its capture and its plain prefill are timed as in
benchmarks/capture_engine.py.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.capture import Shapes, make_samples, write_tokens
from benchmarks.gpu_parts.timing import answer, part_parser, peak_mib, spread
from dsl.op import Ref
from ops.capture_targets.huggingface import HuggingFaceBackend
from ops.capture_targets.layers import spread_layers
from ops.capture_targets.op import CaptureTargets, default_batch_tokens
from ops.capture_targets.run import PARTS_THAT_FILL, capture_shard, plan_shards
from ops.capture_targets.writing import Shard
from ops.lib.data.background_writer import BackgroundWriter
from ops.lib.target.model import Target

QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
TINY = QWEN3_8B | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
LAYERS = 5
SHARDS = 4


def main() -> None:
    options = part_parser(__doc__)
    options.add_argument("--sglang", action="store_true")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = by_sglang if arguments.sglang else by_transformers
        answer(run(arguments.device, arguments.tiny, Path(folder)))


def by_transformers(device: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Tokens per second and gigabytes written of each round, after one that warms up."""
    target = random_target(TINY if tiny else QWEN3_8B, torch.device(device))
    samples = make_samples(
        6 if tiny else 48,
        (8, 24) if tiny else (256, 2048),
        (False,),
        Shapes(vocabulary=target.family.text_config["vocab_size"]),
    )
    reader = write_tokens(folder / "tokens", samples)
    tokens = sum(record["tokens"] for record in reader.records)
    plans = plan_shards("train", reader, -(-tokens // SHARDS))
    layer_ids = spread_layers(target.num_layers, 3 if tiny else LAYERS)
    config = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), dtype="bfloat16")
    backend, budget = HuggingFaceBackend(target), default_batch_tokens(device)
    filled = budget // PARTS_THAT_FILL if device == "cuda" else budget

    def capture() -> float:
        started = time.perf_counter()
        with BackgroundWriter("shards") as writer:
            for plan in plans:
                lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
                shard = Shard(lengths, torch.bfloat16)
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
        "seconds": spread(seconds),
        "tokens_per_second": spread([tokens / each for each in seconds]),
        "mib": memory,
    }


def random_target(sizes: dict[str, Any], device: torch.device) -> Target:
    """A Qwen3 with random weights in bfloat16; nothing is loaded, and nothing is on the host."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16, attn_implementation="sdpa")
    info = {"hidden_size": sizes["hidden_size"], "num_layers": sizes["num_hidden_layers"]}
    return Target(model.eval().requires_grad_(False), info, device)


def by_sglang(device: str, tiny: bool, folder: Path) -> dict[str, Any]:
    """Tokens per second of each round: the capture, and the engine's plain prefill of the same batches."""
    from benchmarks.capture_engine import in_batches, speeds_of  # SGLang is not always installed
    from ops.lib.sglang.runtime import SglangRuntime

    sizes, lengths = (TINY, (8, 24)) if tiny else (QWEN3_8B, (256, 2048))
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    samples = make_samples(6 if tiny else 48, lengths, (False,), Shapes(vocabulary=sizes["vocab_size"]))
    batches = in_batches(samples, 16384)
    layer_ids = spread_layers(sizes["num_hidden_layers"], 3 if tiny else LAYERS)
    with SglangRuntime.start(
        folder,
        device=device,
        dtype="bfloat16",
        pool_tokens=16384,
        context_length=lengths[1],
        server_args={"load_format": "dummy"},
    ) as served:
        sides = {"capture": partial(served.capture, layer_ids=layer_ids), "prefill": served.prefill}
        speeds_of(sides, batches, 1)
        speeds = speeds_of(sides, batches, 2 if tiny else 3)
    return {name: spread(values) for name, values in speeds.items()}


if __name__ == "__main__":
    main()
