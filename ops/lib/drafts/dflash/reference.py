"""Slow formulas of plain DFlash: tensors by their names in the serving contract, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.target.embedding_and_head import logits_of

Weights = Mapping[str, Tensor]


def scores(config: DraftConfig, weights: Weights, hidden_DM: Tensor, head_VM: Tensor, before: list[int]) -> Tensor:
    """What the next token of a block is chosen by, [V], where `before` are the anchor and the tokens chosen so far."""
    return logits_of(hidden_DM[len(before) - 1].to(head_VM.dtype) @ head_VM.T, config.head_settings)


def token_logits(
    config: DraftConfig, weights: Weights, hidden_NKM: Tensor, head_VM: Tensor, tokens_NK: Tensor
) -> Tensor:
    """The logits [N, K, V] from which the loss of every token is computed, given the true tokens before it."""
    return logits_of(hidden_NKM @ head_VM.T, config.head_settings)


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
