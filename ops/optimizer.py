"""AdamW with weight decay on matrices only, and the learning rate over the steps."""

from __future__ import annotations

import math

import torch
from torch import nn


def make_optimizer(
    model: nn.Module, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
    """AdamW over all parameters of a model; norms and biases are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas)


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Of step 0 <= step < total: linear up to the peak over the warm-up, then half a cosine towards zero."""
    warmup = round(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
