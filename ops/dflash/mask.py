"""What a block sees: the context strictly before its anchor, and its own slots. Blocks do not see each other."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_context(anchors_N: Tensor, length: int) -> Tensor:
    """bool [N, length]: context position j is visible to block i iff j < anchor_i.

    The anchor's own feature is not: at decoding its token is known, but the target has not run over it yet.
    """
    return torch.arange(length, device=anchors_N.device) < anchors_N[:, None]
