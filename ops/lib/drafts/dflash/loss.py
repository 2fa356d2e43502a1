"""The loss of every token by itself."""

from __future__ import annotations

from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.losses.loss import Loss, slot_losses
from ops.lib.drafts.losses.loss_request import Asked, Outcome


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states."""
    given = (asked.hidden_WM, head_VM, asked.labels_W, asked.teacher_WM)
    found = slot_losses(loss.kind, *given, alike_W=asked.alike_W, checked=True)
    return Outcome(found.values_W, found.correct_W)
