"""Slow formulas of plain DFlash: tensors by their names in the serving contract, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig

Weights = Mapping[str, Tensor]


def scores(config: DraftConfig, weights: Weights, hidden_DM: Tensor, head_VM: Tensor, before: list[int]) -> Tensor:
    """The logits of a block's next token, [V]. before: the anchor, and the tokens chosen so far."""
    return hidden_DM[len(before) - 1].to(head_VM.dtype) @ head_VM.T


def token_logits(
    config: DraftConfig, weights: Weights, hidden_NKM: Tensor, head_VM: Tensor, tokens_NK: Tensor
) -> Tensor:
    """The logits for the loss of every token, [N, K, V], given the true tokens before it."""
    return hidden_NKM @ head_VM.T


def block_losses(
    config: DraftConfig,
    weights: Weights,
    hidden_NKM: Tensor,
    tokens_NK: Tensor,
    valid_NK: Tensor,
    head_VM: Tensor,
    teacher_NKV: Tensor | None,
    options: Any,
) -> tuple[Tensor, Tensor]:
    """The additional loss of each token, and whether the draft would propose it; both [N, K]. valid_NK: weighted
    tokens.
    """
    return torch.zeros(tokens_NK.shape, dtype=hidden_NKM.dtype), (hidden_NKM @ head_VM.T).argmax(-1) == tokens_NK
