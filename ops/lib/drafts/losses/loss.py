"""The losses: how the slots' cross-entropies or divergences become one number, and its denominator.

Cross-entropies and divergences themselves come from head.py.

Legend: W weighted slots, N blocks, K block size.
"""

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True)
class Loss:
    """Which loss a draft is trained with.

    dflash: cross-entropy with the slots' weights (arXiv 2602.06036, section 4.2). focal: that times
    (1 - p)^focal_gamma, p the label's probability (arXiv 1708.02002, equation 4). kl: the divergence from the
    target's distribution with the slots' weights (DistillSpec, arXiv 2310.08461). dpace: weights from the draft's own
    confidence, smoothed by dpace_alpha (arXiv 2605.18810, equations 7 to 9).
    """

    kind: Literal["dflash", "dpace", "focal", "kl"] = "dflash"
    focal_gamma: float = 2.0
    dpace_alpha: float = 0.5


def combine(loss: Loss, values_W: Tensor, weights_NK: Tensor, rows_W: Tensor, added_W: Tensor | None = None) -> Tensor:
    """The sum over the weighted slots, float64 []: differentiable in values_W, to be divided by `denominator`.

    values_W: cross-entropy of each weighted slot, for "kl" its divergence. rows_W (int64, each slot once) says which
    slot: n * K + k; slots of weight 0 among them count nothing. weights_NK: the slots' weights, 0 for slots outside the
    mask and for slot 0. added_W: an algorithm's own loss of each slot, to which the same weights apply, without the
    focal factor.
    dflash, kl: sum(w value). focal: sum(w (1 - p)^gamma CE), p = exp(-CE), the gradient through both factors.
    dpace: sum(c CE) with c of `dpace_weights`.
    """
    values_W = values_W.to(torch.float64)
    if loss.kind == "dpace":
        weights_W = dpace_weights(values_W.detach(), weights_NK, rows_W, loss.dpace_alpha)
    else:
        weights_W = weights_NK.flatten().index_select(0, rows_W).to(torch.float64)
    added = 0.0 if added_W is None else (weights_W * added_W.to(torch.float64)).sum()
    if loss.kind == "focal":
        # at CE = 0 the power has no finite slope for gammas below 1; the product's own limit there is 0
        wrong_W = -torch.expm1(-values_W)
        weights_W = weights_W * wrong_W.clamp_min(torch.finfo(torch.float64).tiny) ** loss.focal_gamma
    return (weights_W * values_W).sum() + added


def denominator(loss: Loss, weights_NK: Tensor) -> float:
    """What the sum is divided by: sum(w); for dpace the number of blocks with a weighted slot."""
    if loss.kind == "dpace":
        return float((weights_NK > 0).any(dim=1).sum())
    return float(weights_NK.sum(dtype=torch.float64))


def dpace_weights(ce_W: Tensor, weights_NK: Tensor, rows_W: Tensor, alpha: float) -> Tensor:
    """D-PACE's weight of each weighted slot, float64 [W]: how much of the expected accepted length depends on it.

    With q = exp(-CE) and q~ = (1 - alpha) q + alpha: c_j = sum over m >= j of prod over i <= m of q~_i, over the slots
    1.. of a block up to the first one without weight; 0 behind that one and for slot 0.
    """
    smoothed_W = (1 - alpha) * torch.exp(-ce_W.to(torch.float64)) + alpha
    q_NK = torch.zeros(weights_NK.shape, dtype=torch.float64, device=weights_NK.device)
    q_NK.view(-1).index_copy_(0, rows_W, smoothed_W)
    q_NK = torch.where(weights_NK > 0, q_NK, 0.0)
    reach_NK = torch.zeros_like(q_NK)
    reach_NK[:, 1:] = q_NK[:, 1:].cumprod(dim=1)
    weights_NK = torch.where(weights_NK > 0, reach_NK.flip(1).cumsum(dim=1).flip(1), 0.0)
    return weights_NK.flatten().index_select(0, rows_W)
