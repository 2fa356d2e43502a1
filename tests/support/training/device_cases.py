"""The device that tests compute on, and how near to float64 it has to be."""

from __future__ import annotations

import torch


def found_device(name: str) -> torch.device:
    """The device of that name, with its number if it is a GPU; tests/conftest.py has checked that one exists."""
    return torch.device(name) if name == "cpu" else torch.device(name, 0)


def tolerance(device: torch.device, on_cpu: float, on_gpu: float) -> float:
    """The tolerance for this device.

    A GPU multiplies float32 with fewer bits inside compiled attention, and sums in another order.
    """
    return on_cpu if device.type == "cpu" else on_gpu
