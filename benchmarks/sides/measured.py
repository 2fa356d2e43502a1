"""The process of one side: build the problem, warm up, take one step, print its figures as one line of JSON.

On the CPU: one thread, process CPU seconds (`time.process_time`) around one step, measured cold: before it, a step of
tiny sizes has loaded libraries and kernels, on every side. Memory is the peak of the resident set during the step
minus the resident set before it. On a GPU: the median of CUDA-event times over `--steps` steps after `--warm-up` steps
of full size, and the peak of allocated memory above what was allocated before.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_parts.timing import MIB, seconds_of
from benchmarks.gpu_sizes import ALGORITHMS
from benchmarks.harness import reset_peak, resident
from benchmarks.sides.problem import Problem, Sizes, make_problem, warm_up_sizes


@dataclass(frozen=True, eq=False)
class Step:
    """A side's step. run: forward, loss and backward.

    It returns the loss and the number of weighted slots whose best token is their label, as numbers or asynchronous
    tensors. gradients: of every parameter by name, called after the measurement. clear: drops the gradients.
    """

    run: Callable[[], tuple[float | Tensor, int | Tensor]]
    gradients: Callable[[], dict[str, Tensor]]
    clear: Callable[[], None]


MakeStep = Callable[[Problem, argparse.Namespace], Step]


def main(make_step: MakeStep, argv: list[str] | None = None) -> None:
    """Measure one side by the options of the command line, and print a JSON object."""
    arguments = parser().parse_args(argv)
    sizes = sizes_of(arguments)
    torch.set_num_threads(1)
    measure = on_gpu if arguments.device == "cuda" else on_cpu
    figures, step = measure(make_step, sizes, arguments)
    if arguments.save:
        gradients = {name: tensor.detach().contiguous() for name, tensor in step.gradients().items()}
        save_file(gradients, arguments.save)
    print(json.dumps({"sizes": asdict(sizes), "dtype": arguments.dtype, **figures}))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Sizes):
        required = field.name in ("context", "anchors")
        result.add_argument(f"--{field.name.replace('_', '-')}", type=int, required=required)
    result.add_argument("--chunk", type=int, help="anchors in one pass, on sides that can; default: all at once")
    result.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    result.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    result.add_argument("--algorithm", default="dflash", choices=(*ALGORITHMS, "lilicorr"), help="of the draft")
    result.add_argument(
        "--rank",
        type=int,
        help="of the tables of dflash2 and dspark, and a quarter of lilicorr's width; default: a 16th of the hidden "
        "size",
    )
    result.add_argument("--loss", help="of our side; default: dflash")
    result.add_argument("--attention", help="the peer's attention implementation, where it has several")
    result.add_argument("--save", help="a safetensors file for the gradients")
    result.add_argument("--steps", type=int, default=10, help="timed steps on a GPU")
    result.add_argument("--warm-up", type=int, default=3, help="steps before them on a GPU")
    return result


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    values = {field.name: getattr(arguments, field.name) for field in fields(Sizes)}
    return Sizes(**{name: value for name, value in values.items() if value is not None})


def rank_of(sizes: Sizes, rank: int | None) -> int:
    """The rank of the algorithms' low-rank tables; default: a 16th of the hidden size, as published (256 for 4,096)."""
    return rank or max(1, sizes.hidden // 16)


def on_cpu(make_step: MakeStep, sizes: Sizes, arguments: argparse.Namespace) -> tuple[dict[str, object], Step]:
    """Measure one step on the CPU: CPU seconds and MiB."""
    dtype = getattr(torch, arguments.dtype)
    make_step(make_problem(warm_up_sizes(sizes), dtype), arguments).run()
    step = make_step(make_problem(sizes, dtype), arguments)
    gc.collect()
    reset_peak()
    before = resident("VmRSS")
    start = time.process_time()
    loss, correct = step.run()
    seconds = time.process_time() - start
    mib = max(0, resident("VmHWM") - before) / MIB
    return {"seconds": seconds, "mib": mib, "loss": float(loss), "correct": int(correct)}, step


def on_gpu(make_step: MakeStep, sizes: Sizes, arguments: argparse.Namespace) -> tuple[dict[str, object], Step]:
    """Measure steps on a GPU, in seconds and MiB: medians after a warm-up that compiles and tunes kernels."""
    step = make_step(make_problem(sizes, getattr(torch, arguments.dtype), "cuda"), arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    seconds, outcomes = [], []
    for index in range(arguments.warm_up + arguments.steps):
        step.clear()
        if index == arguments.warm_up:
            torch.cuda.reset_peak_memory_stats()
        seconds.append(seconds_of(lambda: outcomes.append(step.run()), torch.device("cuda")))
    loss, correct = outcomes[-1]
    figures = {
        "seconds": statistics.median(seconds[arguments.warm_up :]),
        "times": seconds[arguments.warm_up :],
        "mib": (torch.cuda.max_memory_allocated() - before) / MIB,
        "loss": float(loss),
        "correct": int(correct),
    }
    return figures, step
