"""Answers of a draft whose slots are each right with the same chance."""

from __future__ import annotations

import numpy as np

from ops.lib.drafts.decoding.decode import Decoded


def simulated(generator: np.random.Generator, right: float, block_size: int, length: int) -> Decoded:
    """An answer decoded by a simulated draft whose tokens are right with probability `right`.

    length: tokens after the first one.
    """
    accepted: list[int] = []
    while sum(accepted) + len(accepted) < length:
        accepted.append(min(int(generator.geometric(1 - right)) - 1, block_size - 1))
    return Decoded(tuple(range(length + 1)), accepted=tuple(accepted))
