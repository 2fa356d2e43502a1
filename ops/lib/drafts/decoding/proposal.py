"""What a draft proposes behind the anchors of a batch.

B rows, D proposals
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Proposal:
    """tokens_BD: int64. confidence_BD: of a draft with a confidence head, how probable it says each one is to be
    accepted if those before it are.
    """

    tokens_BD: Tensor
    confidence_BD: Tensor | None = None
