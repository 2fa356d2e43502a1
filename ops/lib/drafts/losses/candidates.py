"""The best tokens of slots through the frozen head, without all logits, and their logits with a gradient.

Legend: W slots, M hidden size, V vocabulary, C candidates, R rows of a tile, T its columns
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.drafts.losses.tiled_softmax import FEW_THREADS
from ops.lib.kernels.c_library import compiled_keep_best
from ops.lib.target.embedding_and_head import AnyHead, capped, folded

TILE = 2**26  # logits at a time
CPU_ROWS = 2**18  # numbers of the head's rows at a time: 1 MiB in float32
GROUP = 64  # columns of a tile whose best is looked at first


@torch.no_grad()
def best_tokens(hidden_WM: Tensor, head: AnyHead, count: int) -> tuple[Tensor, Tensor]:
    """The logits of the `count` best tokens of each slot, [W, C], best first, and the tokens, int64 [W, C]."""
    head_VM, hidden_WM, _, caps = folded(head, hidden_WM)
    rows = max(1, TILE // len(head_VM))
    dtype = hidden_WM.dtype if hidden_WM.is_cuda else torch.promote_types(hidden_WM.dtype, torch.float32)
    head_VM = head_VM.to(dtype)
    found = [(part.to(dtype) @ head_VM.T).topk(count, dim=-1) for part in hidden_WM.split(rows)]
    return capped(torch.cat([best.values for best in found]), caps.own), torch.cat([best.indices for best in found])


def token_logits(hidden_WM: Tensor, head: AnyHead, tokens_WC: Tensor) -> Tensor:
    """The logits of some tokens of each slot, [W, C], in float32 at least; only hidden_WM gets a gradient.

    Memory: the head's rows for a part of the slots at a time, in both passes.
    """
    head_VM, hidden_WM, _, caps = folded(head, hidden_WM)
    return capped(_TokenLogits.apply(hidden_WM, head_VM, tokens_WC), caps.own)


class BestTokens:
    """The best tokens of a chunk of rows, after the tiles so far: values_RC and tokens_RC, the best first."""

    def __init__(self, length: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values_RC = torch.full((length, count), -torch.inf, dtype=dtype, device=device)
        self.tokens_RC = torch.zeros((length, count), dtype=torch.int64, device=device)
        is_fast = device.type == "cpu" and dtype == torch.float32 and torch.get_num_threads() <= FEW_THREADS
        self.function = compiled_keep_best() if is_fast else None
        self.best_of = topk_by_groups if device.type == "cuda" else torch.topk

    def add(self, logits_RT: Tensor, start: int) -> None:
        """Merge a tile of logits into the best tokens so far. start: the token of its first column. The tile is not
        changed.
        """
        count = self.values_RC.shape[1]
        if self.function is not None:
            pointers = (self.values_RC.data_ptr(), self.tokens_RC.data_ptr())
            self.function(logits_RT.data_ptr(), *logits_RT.shape, start, count, *pointers)
            return
        tile_values, places = self.best_of(logits_RT, min(count, logits_RT.shape[1]))
        values = torch.cat((self.values_RC, tile_values), dim=1)
        tokens = torch.cat((self.tokens_RC, places + start), dim=1)
        self.values_RC, places_RC = values.topk(count, dim=1)
        self.tokens_RC = tokens.gather(1, places_RC)


def topk_by_groups(logits_RT: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `torch.topk` of each row by groups of columns; ties are arbitrary.

    Returns values [R, count], best first, and their columns. The best lie in the `count` groups with the largest
    maxima, or behind the last whole group: any logit of another group has `count` logits that are not smaller. A GPU's
    topk reads a row many times; this reads it once, and then a few columns.
    """
    rows, columns = logits_RT.shape
    groups = columns // GROUP
    if groups <= count:
        return tuple(logits_RT.topk(count, dim=1))
    whole_RGT = logits_RT[:, : groups * GROUP].unflatten(1, (groups, GROUP))
    best_RC = whole_RGT.amax(dim=2).topk(count, dim=1).indices
    inside_C = torch.arange(GROUP, device=logits_RT.device)
    behind_B = torch.arange(groups * GROUP, columns, device=logits_RT.device)
    columns_RS = (best_RC[:, :, None] * GROUP + inside_C).flatten(1)
    columns_RS = torch.cat((columns_RS, behind_B.expand(rows, -1)), dim=1)
    values_RC, places_RC = logits_RT.gather(1, columns_RS).topk(count, dim=1)
    return values_RC, columns_RS.gather(1, places_RC)


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_WM: Tensor, head_VM: Tensor, tokens_WC: Tensor) -> Tensor:
        ctx.save_for_backward(head_VM, tokens_WC)
        ctx.dtype = hidden_WM.dtype
        wide = torch.promote_types(hidden_WM.dtype, torch.float32)
        numbers = TILE if hidden_WM.is_cuda else CPU_ROWS
        rows = max(1, numbers // (tokens_WC.shape[1] * head_VM.shape[1]))
        parts = zip(hidden_WM.split(rows), tokens_WC.split(rows), strict=True)
        found = [(head_VM[tokens].to(wide) @ hidden.to(wide)[..., None])[..., 0] for hidden, tokens in parts]
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_WC: Tensor) -> tuple[Tensor, None, None]:
        head_VM, tokens_WC = ctx.saved_tensors
        weights_WC = grad_WC.to(head_VM.dtype)
        return F.embedding_bag(tokens_WC, head_VM, per_sample_weights=weights_WC, mode="sum").to(ctx.dtype), None, None
