"""The losses: how the slots' cross-entropies or divergences become one number, and what it is divided by.

Cross-entropy through the target's frozen head, without keeping logits (`dflash_loss`).

The head gets no gradient, so that of the loss with respect to a hidden state x is w (softmax(x W^T) - onehot) W:
two matrix products over a chunk of slots, made while the chunk's logits are there, and the logits are dropped.

Legend: W weighted slots, M hidden size, V vocabulary, N blocks, K block size.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsl.errors import ConfigError

CHUNK = 1024
KINDS = ("dflash", "dpace", "focal", "kl")


@frozen(kw_only=True)
class Loss:
    """Which loss a draft is trained with.

    dflash: cross-entropy with the slots' weights (arXiv 2602.06036, section 4.2). focal: that times
    (1 - p)^focal_gamma, p the label's probability (arXiv 1708.02002, equation 4). kl: the divergence from the
    target's distribution with the slots' weights. dpace: weights from the draft's own confidence, smoothed by
    dpace_alpha (arXiv 2605.18810, equations 7 to 9).
    Raises ConfigError for another kind, focal_gamma below 0 or dpace_alpha outside 0..1.
    """

    kind: str = "dflash"
    focal_gamma: float = 2.0
    dpace_alpha: float = 0.5

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f'loss: must be one of {", ".join(KINDS)}, got "{self.kind}"')
        if self.focal_gamma < 0:
            raise ConfigError(f"focal_gamma: must be at least 0, got {self.focal_gamma}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"dpace_alpha: must be from 0 to 1, got {self.dpace_alpha}")


def combine(loss: Loss, values_W: Tensor, weights_NK: Tensor, rows_W: Tensor) -> Tensor:
    """The sum over the weighted slots, float64 []: differentiable in values_W, to be divided by `denominator`.

    values_W: cross-entropy of each weighted slot, for "kl" its divergence. rows_W (int64, ascending) says which slot:
    n * K + k. weights_NK: the slots' weights, 0 for slots outside the mask and for slot 0.
    dflash, kl: sum(w value). focal: sum(w (1 - p)^gamma CE), p = exp(-CE), the gradient through both factors.
    dpace: sum(c CE) with c of `dpace_weights`.
    """
    values_W = values_W.to(torch.float64)
    if loss.kind == "dpace":
        return (dpace_weights(values_W.detach(), weights_NK, rows_W, loss.dpace_alpha) * values_W).sum()
    weights_W = weights_NK.flatten()[rows_W].to(torch.float64)
    if loss.kind == "focal":
        # at CE = 0 the power has no finite slope for gammas below 1; the product's own limit there is 0
        wrong_W = -torch.expm1(-values_W)
        weights_W = weights_W * wrong_W.clamp_min(torch.finfo(torch.float64).tiny) ** loss.focal_gamma
    return (weights_W * values_W).sum()


def denominator(loss: Loss, weights_NK: Tensor) -> float:
    """What the sum is divided by: sum(w); for dpace the number of blocks with a weighted slot."""
    if loss.kind == "dpace":
        return float((weights_NK > 0).any(dim=1).sum())
    return float(weights_NK.sum(dtype=torch.float64))


def dpace_weights(ce_W: Tensor, weights_NK: Tensor, rows_W: Tensor, alpha: float) -> Tensor:
    """D-PACE's weight of each weighted slot, float64 [W]: how much of the expected accepted length hangs on it.

    With q = exp(-CE) and q~ = (1 - alpha) q + alpha: c_j = sum over m >= j of prod over i <= m of q~_i, over the slots
    1.. of a block up to the first one without weight; 0 behind that one.
    """
    smoothed_W = (1 - alpha) * torch.exp(-ce_W.to(torch.float64)) + alpha
    q_NK = torch.zeros(weights_NK.shape, dtype=torch.float64, device=weights_NK.device)
    q_NK.view(-1)[rows_W] = smoothed_W
    q_NK = torch.where(weights_NK > 0, q_NK, 0.0)
    reach_NK = torch.zeros_like(q_NK)
    reach_NK[:, 1:] = q_NK[:, 1:].cumprod(dim=1)
    return reach_NK.flip(1).cumsum(dim=1).flip(1).flatten()[rows_W]


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_WM: Tensor, head_VM: Tensor, labels_W: Tensor, weights_W: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, correct = [], []
        gradient_WM = torch.empty_like(hidden_WM)
        for start in range(0, len(hidden_WM), CHUNK):
            rows = slice(start, start + CHUNK)
            labels, weights = labels_W[rows, None], weights_W[rows, None]
            logits = hidden_WM[rows] @ head_VM.T
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            correct.append(logits.argmax(dim=-1) == labels_W[rows])
            log_probabilities = logits.log_softmax(dim=-1)
            losses.append(-(weights * log_probabilities.gather(1, labels)).sum(dtype=torch.float64))
            if ctx.needs_input_grad[0]:
                slope = log_probabilities.exp_()
                slope.scatter_add_(1, labels, torch.full_like(weights, -1, dtype=slope.dtype))
                gradient_WM[rows] = (slope * weights).to(hidden_WM.dtype) @ head_VM
        ctx.save_for_backward(gradient_WM)
        correct_W = torch.cat(correct) if correct else labels_W.bool()
        ctx.mark_non_differentiable(correct_W)
        return torch.stack(losses).sum() if losses else hidden_WM.sum(dtype=torch.float64), correct_W

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_correct: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_WM,) = ctx.saved_tensors
        return gradient_WM * grad_loss.to(gradient_WM.dtype), None, None, None


def dflash_loss(hidden_WM: Tensor, head_VM: Tensor, labels_W: Tensor, weights_W: Tensor) -> tuple[Tensor, Tensor]:
    """sum(w * CE) over slots, float64 [], and whether each slot's best token is its label, bool [W].

    hidden_WM are the final hidden states of the slots with a weight; slot 0 and weightless slots must not be among
    them. The caller divides by sum(w) over the *global* batch. Cross-entropy is computed in float32 (float64 for
    float64 inputs). Only hidden_WM gets a gradient. Memory: chunks of 1024 rows of logits.
    """
    return _FrozenHeadCrossEntropy.apply(hidden_WM, head_VM, labels_W, weights_W)
