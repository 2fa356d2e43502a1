"""Copies from the host to the device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; for CUDA through pinned memory, so that the host does not wait.

    torch keeps the pinned memory until the copy is done.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
