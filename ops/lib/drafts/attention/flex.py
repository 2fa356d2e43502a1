"""Attention of blocks on CUDA: FlexAttention over [context | all blocks] with a block mask, both compiled.

Every query sees two runs of keys: one of the context, one of its own block. Both are looked up in a table, so that the
mask function holds no number: torch.compile would make a symbol of a captured integer, for which inductor's code for
the CPU does not compile and which some backends of FlexAttention refuse. So one graph serves all block sizes, windows
and lengths.

Legend: T packed context tokens, N blocks, K block size, H query heads, G key/value heads, D head size, Q = N * K,
C keys; Q and C with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as flex_kernel

from ops.lib.kernels.device import compiled, leave_open, to_device
from ops.lib.sequence_parallel.context_range import ContextRange

FLEX_TILE = 128  # FlexAttention's block size
SMALLEST_HEAD = 16  # of FlexAttention on CUDA
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE_COUNTS = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")  # of a BlockMask
TILE_LISTS = ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices")

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlexAttention is reliable for such inputs on CUDA."""
    return dtype in FLEX_DTYPES and head_dim >= SMALLEST_HEAD


def flex_attention(
    q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor, k_GTD: Tensor, v_GTD: Tensor, seen: ContextRange, window: int | None
) -> Tensor:
    """Attention of blocks by FlexAttention over [context | all blocks]; [N, K, H, D]. Compiled, with backward, on CUDA
    only.

    N * K and T vary between micro-batches. Both are padded to multiples of FLEX_TILE, so that kernels mask no last tile
    and one graph serves all lengths (dynamic=True). Padding blocks see only their own zero keys, and no query sees
    padding context; neither gets a gradient.
    """
    N, K, H, _ = q_NKHD.shape
    G, T, _ = k_GTD.shape
    on_cuda = q_NKHD.device.type == "cuda"
    more_N, more_T = _flex_padding(N, K, T)
    key = ("flex", q_NKHD.device, K, T, window)
    if key not in seen.derived:
        seen.derived[key] = _flex_mask(seen, K, T, window, q_NKHD.device)
    q_QHD = q_NKHD.flatten(0, 1)
    if more_N:
        q_QHD = F.pad(q_QHD, (0, 0, 0, 0, 0, more_N * K))
    keys_GCD, values_GCD = (
        _joined(context_GTD, own_NKGD.flatten(0, 1).transpose(0, 1), more_T, more_N * K)
        for context_GTD, own_NKGD in ((k_GTD, k_NKGD), (v_GTD, v_NKGD))
    )
    kernel = _compiled_flex() if on_cuda else flex_kernel
    out_1HQD = kernel(
        q_QHD.transpose(0, 1)[None], keys_GCD[None], values_GCD[None], block_mask=seen.derived[key], enable_gqa=H > G
    )
    return out_1HQD[0].transpose(0, 1)[: N * K].unflatten(0, (N, K))


def _joined(context_GTD: Tensor, own_GXD: Tensor, more_T: int, more_X: int) -> Tensor:
    """[context | zeros | own | zeros] as one tensor [G, C, D]."""
    G, _, D = context_GTD.shape
    parts = (context_GTD, context_GTD.new_zeros(G, more_T, D), own_GXD, own_GXD.new_zeros(G, more_X, D))
    return torch.cat([part for part in parts if part.shape[1]], dim=1)


def _flex_padding(N: int, K: int, T: int) -> tuple[int, int]:
    """The blocks and context tokens to add, so that N * K and T are multiples of FLEX_TILE, and N * K at least two
    tiles.

    A single tile of queries would be a size of 1 in the block mask, for which torch recompiles everything.
    """
    step = FLEX_TILE // gcd(FLEX_TILE, K)
    steps = max(-(-N // step), -(-2 * FLEX_TILE // (step * K)))
    return steps * step - N, -T % FLEX_TILE


def _flex_mask(seen: ContextRange, K: int, T: int, window: int | None, device: torch.device) -> BlockMask:
    """The block mask of [context | all blocks]. Compiled code never stores the full mask of queries by keys."""
    more_N, more_T = _flex_padding(len(seen.start_N), K, T)
    runs_4Q = seen_runs(seen, K, T + more_T, window, more_N)
    queries = runs_4Q.shape[1]
    make = _compiled_block_mask() if device.type == "cuda" else block_mask
    table_4Q = to_device(runs_4Q, device)
    leave_open(table_4Q, 1)
    mask = make(visible_by(table_4Q), queries, T + more_T + queries, device)
    for name in TILE_COUNTS:
        leave_open(getattr(mask, name), 2)
    for name in TILE_LISTS:
        leave_open(getattr(mask, name), 2, 3)
    return mask


def seen_runs(seen: ContextRange, K: int, context: int, window: int | None, more_N: int = 0) -> Tensor:
    """The keys that each query sees, int32 [4, Q] on the host: [first, end) in the context, then [first, end) in its
    block.

    The blocks' own keys come after `context` keys. more_N: padding blocks at the end, which see only themselves.
    """
    start_N1, end_N1 = (F.pad(edge_N, (0, more_N))[:, None] for edge_N in (seen.start_N, seen.end_N))
    slot_K = torch.arange(K)
    own_N1 = context + K * torch.arange(len(start_N1))[:, None]
    if window is None:
        runs = (start_N1, end_N1, own_N1, own_N1 + K)
    else:  # of a query at p the keys p - window < j <= p
        reach_K = slot_K - window + 1
        runs = (torch.maximum(start_N1, end_N1 + reach_K), end_N1, own_N1 + reach_K.clamp(min=0), own_N1 + slot_K + 1)
    shape = (len(start_N1), K)
    return torch.stack([edge.expand(shape).flatten() for edge in runs]).to(torch.int32)


def visible_by(runs_4Q: Tensor) -> Visible:
    """A mask function for FlexAttention that looks up the table of `seen_runs` on the device."""

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= runs_4Q[0, query]) & (key < runs_4Q[1, query])
        return in_context | ((key >= runs_4Q[2, query]) & (key < runs_4Q[3, query]))

    return visible


def block_mask(visible: Visible, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Call create_block_mask with the constant FLEX_TILE, so that a compiled graph has no symbol for it."""
    return create_block_mask(visible, None, None, queries, keys, device=device, BLOCK_SIZE=FLEX_TILE)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return compiled(flex_kernel, open_dimension=2)


@cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    return compiled(block_mask)
