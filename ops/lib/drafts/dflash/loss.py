"""The loss of every token by itself."""

from __future__ import annotations

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.losses.loss import Loss, slot_losses
from ops.lib.drafts.losses.loss_request import Asked, Outcome
from ops.lib.target.embedding_and_head import AnyHead


def block_losses(draft: DraftModel, asked: Asked, head: AnyHead, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable."""
    given = (asked.hidden_WM, head, asked.labels_W, asked.teacher_WM)
    found = slot_losses(loss.kind, *given, alike_W=asked.alike_W, checked=True)
    return Outcome(found.values_W, found.correct_W)
