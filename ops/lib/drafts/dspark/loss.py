"""base * loss + l1 * L1 + confidence * BCE, all of the logits with the bias of the *true* token before.

L1 is the sum over the vocabulary of |draft - target|; the confidence head's target is 1 - L1 / 2, which takes no
gradient. A token counts as correct where it would be proposed behind the true ones, as it is when it is reached.
Source: arXiv 2607.05147; ModelOpt and SpecForge have the same terms.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dspark.config import DsparkOptions
from ops.lib.drafts.dspark.model import confidence_head, markov_head
from ops.lib.drafts.losses.comparison import Comparison, compare, compare_and_sum
from ops.lib.drafts.losses.head import Bias
from ops.lib.drafts.losses.kinds import needs_divergence
from ops.lib.drafts.losses.loss import Loss, combine, value_of, weighted_sum
from ops.lib.drafts.losses.loss_request import Asked, Outcome


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states and both heads."""
    options = loss.own
    assert isinstance(options, DsparkOptions)
    hidden_WM, head = asked.hidden_WM, markov_head(draft)
    latent_WR = head.latent(asked.before_W, hidden_WM.dtype)
    total, found = _compared(asked, head_VM, Bias(latent_WR, head.markov_w2.weight), loss)
    losses_W = value_of(loss.kind, found)
    if found.l1_W is None or found.overlap_W is None:
        return Outcome(losses_W, found.correct_W, total=total)
    added_W, overlap_W = options.l1 * found.l1_W, found.overlap_W.detach().clamp(0, 1)
    confidence = confidence_head(draft)
    if confidence is None:
        return Outcome(losses_W, found.correct_W, added_W, (overlap_W,), total)
    logits_W = confidence(hidden_WM, latent_WR).to(overlap_W.dtype)
    entropy_W = options.confidence * binary_cross_entropy_with_logits(logits_W, overlap_W, reduction="none")
    if total is not None:
        total = total + weighted_sum(entropy_W, asked.weights_NK, asked.rows_W)
    return Outcome(losses_W, found.correct_W, added_W + entropy_W, (overlap_W, logits_W.detach().sigmoid()), total)


def _compared(asked: Asked, head_VM: Tensor, bias: Bias, loss: Loss) -> tuple[Tensor | None, Comparison]:
    """The summed loss of all slots, and each slot's comparison; no sum for D-PACE, whose weights need whole blocks."""
    options = loss.own
    assert isinstance(options, DsparkOptions)
    given = (asked.hidden_WM, head_VM, asked.labels_W, asked.teacher_WM, bias)
    divergence, alike_W = needs_divergence(loss.kind), asked.alike_W
    if loss.kind == "dpace":
        return None, compare(*given, divergence=divergence, alike_W=alike_W, checked=True)

    def objective(found: Comparison, slots_R: Tensor) -> Tensor:
        added_R = None if found.l1_W is None else options.l1 * found.l1_W
        return combine(loss, value_of(loss.kind, found), asked.weights_NK, asked.rows_W[slots_R], added_R)

    return compare_and_sum(*given, objective, divergence=divergence, alike_W=alike_W, checked=True)
