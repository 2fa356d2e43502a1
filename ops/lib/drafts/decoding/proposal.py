"""What a draft proposes behind the anchors of a batch.

B rows, D proposals
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Proposal:
    """The tokens that a draft proposes for a block, int64 [B, D].

    confidence_BD: from the draft's confidence head: the probability of each to be accepted if all before it are.
    """

    tokens_BD: Tensor
    confidence_BD: Tensor | None = None
