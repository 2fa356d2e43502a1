"""The machine of the figures: device, versions, peak of a matrix product; and the FLOPs of the steps."""

from __future__ import annotations

import platform
import sys

import torch

from benchmarks.gpu_parts.timing import answer, draft_sizes, part_parser
from benchmarks.gpu_sizes import ALGORITHMS, contexts
from benchmarks.harness import installed_version
from benchmarks.sides.floor import anchors_only
from benchmarks.sides.ours import draft_config, sized, terms
from benchmarks.sides.problem import Sizes, slot_targets
from executor.cost.constants import gpu_named
from ops.lib.drafts.backbone.sizes import step_flops
from ops.lib.drafts.losses.loss import Loss
from ops.train_dflash.hardware import matmul_peak

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "specforge", "speculators", "sglang")


def main() -> None:
    arguments = part_parser(__doc__).parse_args()
    device = torch.device(arguments.device)
    answer(
        {
            "device": device_name(device),
            "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30
            if device.type == "cuda"
            else None,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "versions": {name: found for name in PACKAGES if (found := installed_version(name)) is not None},
            "peak_flops": sheet_peak(device_name(device)),
            "matmul_flops": matmul_peak(device, torch.bfloat16 if device.type == "cuda" else torch.float32),
            "step_flops": {
                algorithm: {
                    str(context): needed_flops(draft_sizes(arguments.tiny, context), algorithm)
                    for context in contexts(arguments.tiny)
                }
                for algorithm in ALGORITHMS
            },
        }
    )


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.processor() or sys.platform})"
    )


def sheet_peak(name: str) -> float | None:
    """The peak FLOP/s of dense bfloat16 products by the data sheet; None for a device that is not in the table."""
    gpu = gpu_named(name)
    return None if gpu is None else gpu.flops


def needed_flops(sizes: Sizes, algorithm: str) -> float:
    """The floating-point operations of one step on the problem of these sizes, by the count that trainings report."""
    problem = anchors_only(sizes)
    weighted = int((slot_targets(problem)[1] > 0).sum())
    seen, own = int(problem.anchors_A.sum()), terms(sizes, algorithm)
    return step_flops(
        draft_config(sizes, sized(algorithm, own)),
        int(problem.anchors_A.max()),
        sizes.anchors,
        seen,
        weighted,
        with_teacher=Loss(kind="dflash", own=own).needs_teacher,
    )


if __name__ == "__main__":
    main()
