"""What a draft proposes behind the anchors of a batch.

B rows, D proposals
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Proposal:
    """Tokens that a draft proposes for a block.

    tokens_BD: int64. confidence_BD: how probable a draft's confidence head says each one is to be accepted if those
    before it are.
    """

    tokens_BD: Tensor
    confidence_BD: Tensor | None = None
