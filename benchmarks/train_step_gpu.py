"""Our training step of a draft for Qwen3-8B on one GPU, against SpecForge's scheme and speculators.

    python benchmarks/train_step_gpu.py                              # 512 anchors x 16 at length 3072, bf16
    python benchmarks/train_step_gpu.py --install-speculators --peak-tflops 989

Seconds are medians of CUDA-event times over several steps after a warm-up that compiles and tunes; memory is the peak
of allocated memory during a step above what weights and inputs take. MFU is the step's floating-point operations
(ops/lib/drafts/dflash/flops.py, the same count for every side) over its time and over the peak, which is measured by a
large bf16 product of matrices unless given. Whatever uses the device is a process of its own, one at a time; this one
does not. Exits with 1 where the sides' losses differ: they compute the same step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.environment import add_arguments, speculators_sides
from benchmarks.gpu_sizes import QWEN3_8B
from benchmarks.harness import Rounds, Side, parser, run_side, save_figures, table
from benchmarks.sides.floor import anchors_only
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Sizes, slot_targets
from benchmarks.train_step import step_rounds, yes_or_no
from ops.lib.drafts.dflash.flops import step_flops

OURS, CHUNKED, DENSE, SPECULATORS = "ours", "ours, chunked", "SpecForge's scheme", "speculators"
MFU_GOAL, FASTER_GOAL = 0.45, 1.5
LOSS_LIMIT = 0.01  # relative, in bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=2)
    options.add_argument("--context", type=int, default=3072)
    options.add_argument("--anchors", type=int, default=512)
    options.add_argument("--chunk", type=int, default=128, help="anchors in one pass of the chunked step")
    options.add_argument("--steps", type=int, default=10, help="timed steps of each process")
    options.add_argument("--peak-tflops", type=float, help="of the device in bf16; default: measured")
    add_arguments(options)
    arguments = options.parse_args(argv)
    if not torch.cuda.is_available():
        print("train_step_gpu: no CUDA device here; benchmarks/train_step.py runs on a CPU", file=sys.stderr)
        return 2
    sides = [
        Side(OURS, "benchmarks.sides.ours"),
        Side(CHUNKED, "benchmarks.sides.ours", ("--chunk", str(arguments.chunk))),
        Side(DENSE, "benchmarks.sides.dense"),
        *speculators_sides(arguments),
    ]
    machine = run_side(Side("machine", "benchmarks.gpu_parts.machine"), [])
    peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else machine["matmul_flops"]
    sizes = {"context": arguments.context, "anchors": arguments.anchors, **QWEN3_8B}
    at = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    at += ["--device=cuda", "--dtype=bfloat16", f"--steps={arguments.steps}"]
    rounds, flops = step_rounds(sides, at, arguments.rounds, {}, ""), needed_flops(Sizes(**sizes))
    print(_report(rounds, flops, peak, machine["device"]))
    save_figures(arguments.json, {"device": machine["device"], "peak": peak, "flops": flops, "figures": rounds.figures})
    differing = differing_losses(rounds, DENSE, LOSS_LIMIT)
    for line in differing:
        print(f"train_step_gpu: {line}", file=sys.stderr)
    return 1 if differing else 0


def needed_flops(sizes: Sizes) -> float:
    """Floating-point operations of one step on this problem."""
    problem = anchors_only(sizes)
    weighted = int((slot_targets(problem)[1] > 0).sum())
    seen = int(problem.anchors_A.sum())
    return step_flops(draft_config(sizes), int(problem.anchors_A.max()), sizes.anchors, seen, weighted)


def differing_losses(rounds: Rounds, reference: str, limit: float) -> list[str]:
    """A message for every side whose loss differs from the reference's by more than this fraction of it.

    A side that computes something else has nothing to be compared by.
    """
    expected = rounds.median(reference, "loss")
    found = {side: rounds.median(side, "loss") for side in rounds.figures if "loss" in rounds.figures[side][0]}
    return [
        f"{side}: its loss is {loss:.6g}, that of {reference} {expected:.6g}; both compute the same step"
        for side, loss in found.items()
        if not abs(loss - expected) <= limit * abs(expected)
    ]


def _report(rounds: Rounds, flops: float, peak: float, device: str) -> str:
    rows = [["side", "seconds", "MFU", "MiB", f"faster than {DENSE}"]]
    for side in (OURS, CHUNKED, DENSE, SPECULATORS):
        if side not in rounds.figures:
            rows.append([side, "not installed", "", "", ""])
            continue
        seconds, memory = rounds.median(side, "seconds"), rounds.median(side, "mib")
        share, faster = flops / seconds / peak, rounds.ratio(DENSE, side, "seconds")
        rows.append([side, f"{seconds:.4f}", f"{share:.1%}", f"{memory:.0f}", f"{faster:.2f}x"])
    mfu, faster = flops / rounds.median(OURS, "seconds") / peak, rounds.ratio(DENSE, OURS, "seconds")
    goals = [
        ["goal", "wanted", "measured", "holds"],
        ["MFU", f">= {MFU_GOAL:.0%}", f"{mfu:.1%}", yes_or_no(mfu >= MFU_GOAL)],
        ["time", f">= {FASTER_GOAL}x faster", f"{faster:.2f}x", yes_or_no(faster >= FASTER_GOAL)],
    ]
    head = f"{device}, peak {peak / 1e12:.0f} TFLOP/s, {flops / 1e12:.1f} TFLOP a step"
    return "\n\n".join(["", head, table(rows), table(goals)])


if __name__ == "__main__":
    sys.exit(main())
