"""base * loss + penalty * the mean square of the slot's bias, every token by itself.

The bias is a one-hot latent times the table, so that the fused head adds it. Its size is a metric.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import one_hot

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.losses.head import Bias
from ops.lib.drafts.losses.loss import Loss, slot_losses
from ops.lib.drafts.losses.loss_request import Asked, Outcome
from slot_bias.config import SlotBiasOptions
from slot_bias.model import scale_of, table_of


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable."""
    options, table_VD = loss.own, table_of(draft)
    assert isinstance(options, SlotBiasOptions)
    block_size = asked.tokens_NK.shape[1]
    slot_W = (asked.rows_W % block_size - 1).clamp(min=0)
    latent_WD = scale_of(draft.config) * one_hot(slot_W, block_size - 1).to(asked.hidden_WM.dtype)
    bias = Bias(latent_WD, table_VD)
    found = slot_losses(loss.kind, asked.hidden_WM, head_VM, asked.labels_W, asked.teacher_WM, bias, checked=True)
    square_W = (scale_of(draft.config) * table_VD).square().mean(0)[slot_W]
    return Outcome(found.values_W, found.correct_W, options.penalty * square_W, (square_W.detach().sqrt(),))
