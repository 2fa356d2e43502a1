"""DFlash2 slowly: tensors by their names in the serving contract, loops over slots and candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.dflash2.config import Dflash2Options, sizes
from ops.lib.target.embedding_and_head import logits_of

Weights = Mapping[str, Tensor]
SELECTOR = "candidate_selector"


def enter(own: Weights, sublayer: str, x_NKM: Tensor) -> tuple[Tensor, Tensor]:
    """The input of a sublayer, "attention" or "mlp", and the kernels made from x. own: the layer's tensors."""
    base = own[f"{sublayer}_conv.base_kernel"]
    made = x_NKM @ own[f"{sublayer}_conv.kernel_projection.weight"].T
    made = made.unflatten(-1, (2, base.shape[1], -1)).repeat_interleave(
        base.shape[2] * base.shape[1] * 2 // made.shape[-1], dim=-1
    )
    return _convolved(base[0] + made[:, :, 0], x_NKM), base[1] + made[:, :, 1]


def leave(own: Weights, sublayer: str, y_NKM: Tensor, kept: Tensor) -> Tensor:
    """The addition to the residual stream: the sublayer's output, convolved."""
    return _convolved(kept, y_NKM)


def _convolved(kernels: Tensor, y_NKM: Tensor) -> Tensor:
    """The convolution of each slot with the slots before it, [N, K, M]. kernels: [N, K, taps, M]."""
    slots = []
    for slot in range(y_NKM.shape[1]):
        terms = [kernels[:, slot, tap] * y_NKM[:, slot - tap] for tap in range(min(kernels.shape[2], slot + 1))]
        slots.append(torch.stack(terms).sum(0))
    return torch.stack(slots, dim=1)


def scores(config: DraftConfig, weights: Weights, hidden_DM: Tensor, head_VM: Tensor, before: list[int]) -> Tensor:
    """The logits of a block's next token, [V]. before: the anchor, and the tokens chosen so far."""
    hidden_M = hidden_DM[len(before) - 1]
    logits_V = hidden_M.to(head_VM.dtype) @ head_VM.T
    logits_V = logits_of(logits_V.to(torch.promote_types(logits_V.dtype, torch.float32)), config.head_settings)
    found = torch.full_like(logits_V, float("-inf"))
    for candidate in logits_V.topk(sizes(config).candidates).indices.tolist():
        found[candidate] = logits_V[candidate] + _follows(weights, hidden_M, before[-1], candidate)
    return found


def token_logits(
    config: DraftConfig, weights: Weights, hidden_NKM: Tensor, head_VM: Tensor, tokens_NK: Tensor
) -> Tensor:
    """The logits [N, K, V] from which the base loss of every token is computed."""
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
    """The selector's cross-entropy of each token, and whether it would choose the token after the true ones; both [N,
    K].
    """
    assert isinstance(options, Dflash2Options)
    added_NK = torch.zeros(tokens_NK.shape, dtype=hidden_NKM.dtype)
    right_NK = torch.zeros(tokens_NK.shape, dtype=torch.bool)
    for block, place in valid_NK.nonzero().tolist():
        before, token = tokens_NK[block, place - 1 : place + 1].tolist()
        hidden_M = hidden_NKM[block, place]
        logits_V = logits_of(head_VM @ hidden_M, config.head_settings)
        candidates = logits_V.topk(sizes(config).candidates).indices.tolist()
        label = token if options.label == "data" else int(_teacher(teacher_NKV)[block, place].argmax())
        if label in candidates or options.missing == "replace":
            offered = candidates if label in candidates else [*candidates[:-1], label]
            scores_C = torch.stack([logits_V[each] + _follows(weights, hidden_M, before, each) for each in offered])
            added_NK[block, place] = options.selector * (scores_C.logsumexp(0) - scores_C[offered.index(label)])
        walk_C = torch.stack([logits_V[each] + _follows(weights, hidden_M, before, each) for each in candidates])
        right_NK[block, place] = candidates[int(walk_C.argmax())] == token
    return added_NK, right_NK


def _teacher(teacher_NKV: Tensor | None) -> Tensor:
    assert teacher_NKV is not None
    return teacher_NKV


def _follows(weights: Weights, hidden_M: Tensor, before: int, candidate: int) -> Tensor:
    wanted = weights[f"{SELECTOR}.predecessor_codebook"][before] * (
        weights[f"{SELECTOR}.hidden_projection.weight"] @ hidden_M
    )
    return wanted @ weights[f"{SELECTOR}.successor_codebook"][candidate]
