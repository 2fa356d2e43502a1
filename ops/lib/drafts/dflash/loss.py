"""Cross-entropy, or the divergence from the target, of every token by itself."""

from __future__ import annotations

from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.losses.asked import Asked, Outcome
from ops.lib.drafts.losses.head import head_cross_entropy, head_kl
from ops.lib.drafts.losses.loss import Loss


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable."""
    if asked.teacher_WM is None:
        return Outcome(*head_cross_entropy(asked.hidden_WM, head_VM, asked.labels_W, checked=True))
    return Outcome(*head_kl(asked.hidden_WM, asked.teacher_WM, head_VM, asked.labels_W, checked=True))
