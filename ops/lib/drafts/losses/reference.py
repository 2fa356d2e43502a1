"""The losses of slots as their formulas have them, over all logits; slow, in any floating dtype.

They define what head.py and comparison.py compute tile by tile.

Legend: N slots in any shape, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.losses.kinds import LossKind


def reference_slot_losses(kind: LossKind, logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor | None) -> Tensor:
    """The loss of each slot, differentiable, before the weights: of the logits, with their bias if there is one.

    teacher_NV: the target's logits, for the kinds that read them. With q the draft's probabilities and p the target's:
    kl: sum p log(p / q). l1: sum |q - p|. lk: w KL + (1 - w) l1 / 2, w = exp(-3 a), a = sum min(p, q) without
    gradient. nla: -log a. All others: the cross-entropy.
    """
    log_q_NV = logits_NV.log_softmax(-1)
    if kind not in ("kl", "l1", "lk", "nla"):
        return -log_q_NV.gather(-1, labels_N[..., None])[..., 0]
    assert teacher_NV is not None
    log_p_NV = teacher_NV.log_softmax(-1)
    q_NV, p_NV = log_q_NV.exp(), log_p_NV.exp()
    kl_N = (p_NV * (log_p_NV - log_q_NV)).sum(-1)
    l1_N = (q_NV - p_NV).abs().sum(-1)
    overlap_N = torch.minimum(p_NV, q_NV).sum(-1)
    blend_N = torch.exp(-3 * overlap_N.detach())
    losses = {"kl": kl_N, "l1": l1_N, "lk": blend_N * kl_N + (1 - blend_N) * l1_N / 2, "nla": -overlap_N.log()}
    return losses[kind]
