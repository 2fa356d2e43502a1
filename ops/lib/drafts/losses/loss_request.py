"""What a training step asks of an algorithm's loss for some slots, and what it gets.

Legend: W slots, M hidden size, N blocks, K tokens of a block, the anchor's first.
"""

from __future__ import annotations

from attrs import field, frozen
from torch import Tensor


@frozen(eq=False)
class Asked:
    """Request for the losses of some slots.

    hidden_WM: the draft's states, each of which predicts one token. rows_W, int64: which, n * K + k for the token k
    behind the anchor of block n; a row with k = 0 has no weight. tokens_NK: the true tokens. weights_NK, float32: how
    much each counts. teacher_WM: the target's final states that predict the same tokens, where the loss asks for them;
    slots with the same number in alike_W, int64 on the CPU, have the same.
    """

    hidden_WM: Tensor
    rows_W: Tensor
    tokens_NK: Tensor
    weights_NK: Tensor
    teacher_WM: Tensor | None = None
    alike_W: Tensor | None = None

    @property
    def labels_W(self) -> Tensor:
        return self.tokens_NK.flatten().index_select(0, self.rows_W)

    @property
    def before_W(self) -> Tensor:
        """The true token before each one."""
        return self.tokens_NK.flatten().index_select(0, (self.rows_W - 1).clamp(min=0))


@frozen(eq=False)
class Outcome:
    """Losses that an algorithm found for the slots.

    losses_W: of each token, which the slots' weights and D-PACE's confidences are applied to. correct_W, bool: the
    draft would propose the true token. added_W: more loss, with the same weights. found: the `metrics` of the
    algorithm's config, each [W], without a gradient. total, []: all of it already summed with `combine`, which has the
    gradient then instead of losses_W and added_W.
    """

    losses_W: Tensor
    correct_W: Tensor
    added_W: Tensor | None = None
    found: tuple[Tensor, ...] = field(default=())
    total: Tensor | None = None
