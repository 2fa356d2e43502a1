"""What a training step asks of an algorithm's loss for some slots, and what it gets.

Legend: W slots, M hidden size, N blocks, K tokens of a block, the anchor's first.
"""

from __future__ import annotations

from attrs import field, frozen
from torch import Tensor

from ops.lib.drafts.block_context import BlockContext


@frozen(eq=False)
class Asked:
    """A request for the losses of some slots, passed to an algorithm.

    hidden_WM: the draft's states, each of which predicts one token. rows_W, int64: n * K + k for the token k after the
    anchor of block n; k = 0 has no weight. tokens_NK: the true tokens. weights_NK, float32: their weights. teacher_WM:
    the target's final states for the same tokens, if the loss needs them. alike_W, int64 on the CPU: slots with equal
    numbers have equal teacher states. context: of the N blocks, for an algorithm that reads it.
    """

    hidden_WM: Tensor
    rows_W: Tensor
    tokens_NK: Tensor
    weights_NK: Tensor
    teacher_WM: Tensor | None = None
    alike_W: Tensor | None = None
    context: BlockContext | None = None

    @property
    def labels_W(self) -> Tensor:
        return self.tokens_NK.flatten().index_select(0, self.rows_W)

    @property
    def before_W(self) -> Tensor:
        """The true token before each requested token, int64 [W]."""
        return self.tokens_NK.flatten().index_select(0, (self.rows_W - 1).clamp(min=0))


@frozen(eq=False)
class Outcome:
    """The losses that an algorithm computed for the slots.

    losses_W: per token, to be multiplied by the slots' weights and D-PACE's confidences. correct_W, bool: whether the
    draft would propose the true token. added_W: further loss with the same weights. found: the `metrics` of the
    algorithm's config, each [W], without gradient. total, []: the sum of all, made by `combine`; if given, it has the
    gradient instead of losses_W and added_W.
    """

    losses_W: Tensor
    correct_W: Tensor
    added_W: Tensor | None = None
    found: tuple[Tensor, ...] = field(default=())
    total: Tensor | None = None
