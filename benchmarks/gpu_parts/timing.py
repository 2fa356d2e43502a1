"""Times of a function on a device: CUDA events on a GPU, the clock elsewhere; what each part's command line shares."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu_sizes import contexts, step_sizes
from benchmarks.sides.problem import Sizes

MIB = 2**20


def part_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with --device and --tiny, which every part has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only test the code")
    return parser


def draft_sizes(tiny: bool, context: int | None = None) -> Sizes:
    """The sizes of the Qwen3-8B draft with 512 anchors, or of one that trains in a moment.

    context: the number of context tokens; default: the shortest that is timed.
    """
    return Sizes(**step_sizes(tiny, context or contexts(tiny)[0]))


def times_of(run: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> dict[str, Any]:
    """Measure the seconds of `run`: median, least, most and all values, after calls that compile and tune kernels."""
    return spread([seconds_of(run, device) for _ in range(warm_up + repeats)][warm_up:])


def spread(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "times": seconds}


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """The peak memory in MiB that a GPU's allocator held during `run` above what it held before; None on a CPU."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def answer(figures: Mapping[str, Any]) -> None:
    """Print figures as the last line of a part's output, which benchmarks/gpu.py reads."""
    print(json.dumps(figures), flush=True)
