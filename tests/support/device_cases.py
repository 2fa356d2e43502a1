"""The device that tests compute on, and how near to float64 it has to be."""

from __future__ import annotations

import torch


def found_device(name: str) -> torch.device:
    """The device of that name, with its number where it is a GPU. Raises RuntimeError where there is none."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda", 0)


def tolerance(device: torch.device, on_cpu: float, on_gpu: float) -> float:
    """A GPU multiplies float32 in fewer bits inside compiled attention, and sums in another order."""
    return on_cpu if device.type == "cpu" else on_gpu
