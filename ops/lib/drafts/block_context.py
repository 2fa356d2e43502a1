"""What a head may read of a block beside its hidden states: the target's embedding, and the end of its context.

An algorithm whose config has `reads_context` (`ReadsContext`) gets it: as `Asked.context` in a loss, and as one more,
last argument of `propose` and of `scores` and `block_losses` in its reference.

N blocks, V vocabulary, M hidden size
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class BlockContext:
    """The surroundings of N blocks.

    embed_VM: the target's embedding, frozen. last_NM: the context feature of the last token before each anchor, zero
    where there is none. is_there_N, bool: whether there is one.
    """

    embed_VM: Tensor
    last_NM: Tensor
    is_there_N: Tensor
