"""Our training step of a draft for Qwen3-8B on one GPU, against SpecForge's scheme and speculators.

    python benchmarks/train_step_gpu.py                              # 512 anchors x 16 at length 3072, bf16
    python benchmarks/train_step_gpu.py --install-speculators --peak-tflops 989

Seconds are medians of CUDA-event times over several steps after a warm-up that compiles and tunes; memory is the peak
of allocated memory during a step above what weights and inputs take. MFU is the step's floating-point operations
(ops/lib/drafts/dflash/flops.py, the same count for every side) over its time and over the peak, which is measured by a
large bf16 product of matrices unless given. Whatever uses the device is a process of its own, one at a time; this one
does not. Ends with 1 where the sides' losses differ: they compute the same step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.environment import default_folder, install, interpreter
from benchmarks.gpu_sizes import QWEN3_8B
from benchmarks.rounds import Setting, Side, differing_losses, run_setting, run_side, table
from benchmarks.sides.floor import anchors_only
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Sizes, slot_targets
from ops.lib.drafts.dflash.flops import step_flops

OURS, CHUNKED, DENSE, SPECULATORS = "ours", "ours, chunked", "SpecForge's scheme", "speculators"
MFU_GOAL, FASTER_GOAL = 0.45, 1.5
LOSS_LIMIT = 0.01  # relative, in bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if not torch.cuda.is_available():
        print("train_step_gpu: no CUDA device here; benchmarks/train_step.py runs on a CPU", file=sys.stderr)
        return 2
    if arguments.install_speculators:
        install(arguments.speculators_venv)
    sizes = Sizes(context=arguments.context, anchors=arguments.anchors, **QWEN3_8B)
    device = run_side(Side("peak", "benchmarks.sides.peak"), [])
    peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else device["peak"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in QWEN3_8B.items()]
    options += ["--device=cuda", "--dtype=bfloat16", f"--steps={arguments.steps}"]
    setting = run_setting(_sides(arguments), sizes.context, sizes.anchors, options, arguments.rounds, {})
    flops = needed_flops(sizes)
    print(_report(setting, flops, peak, device["name"]))
    if arguments.json:
        figures = {"device": device["name"], "peak": peak, "flops": flops, "figures": setting.figures}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    differing = differing_losses(setting, DENSE, LOSS_LIMIT)
    print("\n".join(f"train_step_gpu: {line}" for line in differing), file=sys.stderr, end="\n" if differing else "")
    return 1 if differing else 0


def needed_flops(sizes: Sizes) -> float:
    """Floating-point operations of one step on this problem."""
    problem = anchors_only(sizes)
    weighted = int((slot_targets(problem)[1] > 0).sum())
    seen = int(problem.anchors_A.sum())
    return step_flops(draft_config(sizes), int(problem.anchors_A.max()), sizes.anchors, seen, weighted)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=3072)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128, help="anchors in one pass of the chunked step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each process")
    parser.add_argument("--peak-tflops", type=float, help="of the device in bf16; measured unless given")
    parser.add_argument("--speculators-venv", type=Path, default=default_folder(), metavar="FOLDER")
    parser.add_argument("--install-speculators", action="store_true", help="make that environment first, with pip")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    return parser.parse_args(argv)


def _sides(arguments: argparse.Namespace) -> list[Side]:
    sides = [
        Side(OURS, "benchmarks.sides.ours"),
        Side(CHUNKED, "benchmarks.sides.ours", ("--chunk", str(arguments.chunk))),
        Side(DENSE, "benchmarks.sides.dense"),
    ]
    python = interpreter(arguments.speculators_venv)
    return [*sides, Side(SPECULATORS, "benchmarks.sides.speculators_peer", python=python)] if python else sides


def _report(setting: Setting, flops: float, peak: float, device: str) -> str:
    rows = [["side", "seconds", "MFU", "MiB", f"faster than {DENSE}"]]
    for side in (OURS, CHUNKED, DENSE, SPECULATORS):
        if side not in setting.figures:
            rows.append([side, "not installed", "", "", ""])
            continue
        seconds, memory = setting.median(side, "seconds"), setting.median(side, "mib")
        share, faster = flops / seconds / peak, setting.ratio(DENSE, side, "seconds")
        rows.append([side, f"{seconds:.4f}", f"{share:.1%}", f"{memory:.0f}", f"{faster:.2f}x"])
    mfu, faster = flops / setting.median(OURS, "seconds") / peak, setting.ratio(DENSE, OURS, "seconds")
    goals = [
        ["goal", "wanted", "measured", "holds"],
        ["MFU", f">= {MFU_GOAL:.0%}", f"{mfu:.1%}", "yes" if mfu >= MFU_GOAL else "NO"],
        ["time", f">= {FASTER_GOAL}x faster", f"{faster:.2f}x", "yes" if faster >= FASTER_GOAL else "NO"],
    ]
    head = f"{device}, peak {peak / 1e12:.0f} TFLOP/s, {flops / 1e12:.1f} TFLOP a step"
    return "\n\n".join(["", head, table(rows), table(goals)])


if __name__ == "__main__":
    sys.exit(main())
