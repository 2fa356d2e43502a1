"""Where the time of our step goes: host and device, and the kernels of one step by their time, which go to a file too.

The host's time is that of starting a step's work, the wall's that until it is done: a device that waits for the host
has both alike. On a CPU, operations take the place of kernels.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu_parts.timing import answer, draft_sizes, part_parser
from benchmarks.gpu_sizes import ALGORITHMS
from benchmarks.sides import measured, ours
from benchmarks.sides.problem import make_problem

WARM_UP, STEPS = 4, 3
IN_FILE, SHOWN = 40, 12  # kernels


def main() -> None:
    parser = part_parser(__doc__)
    parser.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder of profile_ALGORITHM.txt")
    parser.set_defaults(rank=None, chunk=None, loss=None)  # what the step reads beside the algorithm
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    problem = make_problem(draft_sizes(arguments.tiny), dtype, arguments.device)
    step = ours.make_step(problem, arguments)
    run_steps(step, WARM_UP)
    _wait(on_gpu)
    started = time.perf_counter()
    run_steps(step, STEPS)
    host = (time.perf_counter() - started) / STEPS
    _wait(on_gpu)
    wall = (time.perf_counter() - started) / STEPS
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profile:
        run_steps(step, 1)
        _wait(on_gpu)
    spent, kind = ("self_device_time_total", DeviceType.CUDA) if on_gpu else ("self_cpu_time_total", DeviceType.CPU)
    # An operation and an annotation have the time of their kernels once more.
    events = [event for event in profile.key_averages() if event.device_type == kind and not event.is_user_annotation]
    kernels = sorted(
        ((event.key, getattr(event, spent) / 1e6, event.count) for event in events), key=lambda kernel: -kernel[1]
    )
    lines = [f"{seconds * 1e3:10.3f} ms {count:6d} times  {name}" for name, seconds, count in kernels[:IN_FILE]]
    (arguments.out / f"profile_{arguments.algorithm}.txt").write_text("\n".join(lines) + "\n")
    answer(
        {
            "wall": wall,
            "host": host,
            "device": sum(seconds for _, seconds, _ in kernels),
            "kernels": [
                {"name": name[:100], "seconds": seconds, "count": count} for name, seconds, count in kernels[:SHOWN]
            ],
        }
    )


def run_steps(step: measured.Step, count: int) -> None:
    for _ in range(count):
        step.clear()
        step.run()


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
