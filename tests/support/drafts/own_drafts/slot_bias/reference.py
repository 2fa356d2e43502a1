"""Slow formulas of the scores and the loss, by the names of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig
from slot_bias.model import scale_of

Weights = Mapping[str, Tensor]


def scores(config: DraftConfig, weights: Weights, hidden_DM: Tensor, head_VM: Tensor, before: list[int]) -> Tensor:
    """The logits [V] by which the next token of a block is chosen. before: the anchor and the tokens chosen so far."""
    slot = len(before) - 1
    bias_V = scale_of(config) * weights["slot_bias.table"][:, slot].to(head_VM.dtype)
    return head_VM @ hidden_DM[slot].to(head_VM.dtype) + bias_V


def token_logits(
    config: DraftConfig, weights: Weights, hidden_NKM: Tensor, head_VM: Tensor, tokens_NK: Tensor
) -> Tensor:
    """The logits [N, K, V] from which the loss of every token is computed, given the true tokens before it."""
    table_VD = scale_of(config) * weights["slot_bias.table"]
    return hidden_NKM @ head_VM.T + torch.cat((table_VD[:, :1], table_VD), dim=1).T


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
    """The additional loss of each token, and whether the draft would propose it; both [N, K]."""
    logits_NKV = token_logits(config, weights, hidden_NKM, head_VM, tokens_NK)
    square_D = (scale_of(config) * weights["slot_bias.table"]).square().mean(0)
    added_K = options.penalty * torch.cat((square_D[:1], square_D))
    return added_K.expand(tokens_NK.shape), logits_NKV.argmax(-1) == tokens_NK
