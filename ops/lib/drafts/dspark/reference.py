"""DSpark slowly: tensors by their names in the serving contract, all logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.dspark.config import DsparkOptions

Weights = Mapping[str, Tensor]


def scores(config: DraftConfig, weights: Weights, hidden_DM: Tensor, head_VM: Tensor, before: list[int]) -> Tensor:
    """The logits of a block's next token, [V]. before: the anchor, and the tokens chosen so far."""
    latent_R, table_VR = _tables(weights, torch.tensor(before[-1], device=head_VM.device))
    return hidden_DM[len(before) - 1].to(head_VM.dtype) @ head_VM.T + table_VR.to(head_VM.dtype) @ latent_R.to(
        head_VM.dtype
    )


def token_logits(
    config: DraftConfig, weights: Weights, hidden_NKM: Tensor, head_VM: Tensor, tokens_NK: Tensor
) -> Tensor:
    """The logits for the loss of every token, [N, K, V], given the true tokens before it."""
    latent_NKR, table_VR = _tables(weights, _before(tokens_NK))
    return hidden_NKM @ head_VM.T + latent_NKR @ table_VR.T


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
    assert isinstance(options, DsparkOptions)
    logits_NKV = token_logits(config, weights, hidden_NKM, head_VM, tokens_NK)
    right_NK = logits_NKV.argmax(-1) == tokens_NK
    if teacher_NKV is None:
        return torch.zeros(tokens_NK.shape, dtype=hidden_NKM.dtype), right_NK
    l1_NK = (logits_NKV.softmax(-1) - teacher_NKV.softmax(-1)).abs().sum(-1)
    added_NK = options.l1 * l1_NK
    if "confidence_head.proj.weight" in weights:
        latent_NKR, _ = _tables(weights, _before(tokens_NK))
        joined = torch.cat((hidden_NKM, latent_NKR), dim=-1)
        confidence_NK = (
            joined @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"]
        ).sigmoid()
        wanted_NK = (1 - l1_NK / 2).detach()
        entropy_NK = -(wanted_NK * confidence_NK.log() + (1 - wanted_NK) * (1 - confidence_NK).log())
        added_NK = added_NK + options.confidence * entropy_NK
    return added_NK, right_NK


def _before(tokens_NK: Tensor) -> Tensor:
    """The token before each token; for the anchor, which is not predicted, the anchor itself."""
    return torch.cat((tokens_NK[:, :1], tokens_NK[:, :-1]), dim=1)


def _tables(weights: Weights, before: Tensor) -> tuple[Tensor, Tensor]:
    return weights["markov_head.markov_w1.weight"][before], weights["markov_head.markov_w2.weight"]
