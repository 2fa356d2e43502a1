"""Moving what the host knows to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; for CUDA by way of pinned memory, so that the host does not wait.

    torch keeps the pinned memory until the copy has happened.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
