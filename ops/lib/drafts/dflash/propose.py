"""Every token of a block is chosen by itself."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.sampling import Choice


def propose(
    draft: DraftModel,
    hidden_BDM: Tensor,
    anchors_B: Tensor,
    head_VM: Tensor,
    choice: Choice,
    check: Callable[[Tensor], None],
) -> Tensor:
    """The tokens behind each anchor, int64 [B, D]. check: called with logits [B, D, V], refuses those that are not
    finite.
    """
    logits_BDV = hidden_BDM.to(head_VM.dtype) @ head_VM.T
    check(logits_BDV)
    return choice.propose(logits_BDV)
