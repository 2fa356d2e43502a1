"""The best tokens of slots through the frozen head, without all logits, and their logits with a gradient.

Legend: W slots, M hidden size, V vocabulary, C candidates, R rows of a tile
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2**26  # logits at a time


@torch.no_grad()
def best_tokens(hidden_WM: Tensor, head_VM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The logits of the `count` best tokens of each slot, [W, C], best first, and the tokens, int64 [W, C]."""
    rows = max(1, TILE // len(head_VM))
    dtype = hidden_WM.dtype if hidden_WM.is_cuda else torch.promote_types(hidden_WM.dtype, torch.float32)
    head_VM = head_VM.to(dtype)
    found = [(part.to(dtype) @ head_VM.T).topk(count, dim=-1) for part in hidden_WM.split(rows)]
    return torch.cat([best.values for best in found]), torch.cat([best.indices for best in found])


def token_logits(hidden_WM: Tensor, head_VM: Tensor, tokens_WC: Tensor) -> Tensor:
    """The logits of some tokens of each slot, [W, C], in float32 at least; only hidden_WM gets a gradient.

    Memory: rows of the head for a part of the slots at a time, in both passes.
    """
    return _TokenLogits.apply(hidden_WM, head_VM, tokens_WC)


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_WM: Tensor, head_VM: Tensor, tokens_WC: Tensor) -> Tensor:
        ctx.save_for_backward(head_VM, tokens_WC)
        ctx.dtype = hidden_WM.dtype
        wide = torch.promote_types(hidden_WM.dtype, torch.float32)
        rows = max(1, TILE // (tokens_WC.shape[1] * head_VM.shape[1]))
        parts = zip(hidden_WM.split(rows), tokens_WC.split(rows), strict=True)
        found = [(head_VM[tokens].to(wide) @ hidden.to(wide)[..., None])[..., 0] for hidden, tokens in parts]
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_WC: Tensor) -> tuple[Tensor, None, None]:
        head_VM, tokens_WC = ctx.saved_tensors
        weights_WC = grad_WC.to(head_VM.dtype)
        return F.embedding_bag(tokens_WC, head_VM, per_sample_weights=weights_WC, mode="sum").to(ctx.dtype), None, None
