"""Attention of blocks on CUDA: FlexAttention over [context | all blocks] with a block mask, both compiled.

Legend: T packed context tokens, N blocks, K block size, H query heads, G key/value heads, D head size, Q = N * K,
C keys; Q and C with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as flex_kernel

from ops.dflash.seen import Seen

FLEX_TILE = 128  # FlexAttention's block size


def flex_attention(
    q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor, k_GTD: Tensor, v_GTD: Tensor, seen: Seen, window: int | None
) -> Tensor:
    """Attention by FlexAttention over [context | all blocks], [N, K, H, D]; compiled on CUDA; forward only elsewhere.

    N * K and T differ from micro-batch to micro-batch. Both are padded to multiples of FLEX_TILE, so that no kernel
    needs to mask its last tile, and the graph is compiled once for all lengths (dynamic=True). Padding blocks see their
    own zero keys and nothing else, padding context is seen by nobody; both get no gradient.
    """
    N, K, H, D = q_NKHD.shape
    G, T, _ = k_GTD.shape
    compiled = q_NKHD.device.type == "cuda"
    more_N, more_T = _flex_padding(N, K, T)
    key = ("flex", q_NKHD.device, K, T, window)
    if key not in seen.derived:
        seen.derived[key] = _flex_mask(seen, K, T, window, q_NKHD.device, compiled)
    own = (torch.cat((x, x.new_zeros(more_N, *x.shape[1:]))) for x in (q_NKHD, k_NKGD, v_NKGD))
    q_QHD, k_QGD, v_QGD = (x.flatten(0, 1) for x in own)
    padding_GTD = k_GTD.new_zeros(G, more_T, D)
    keys_GCD = torch.cat((k_GTD, padding_GTD, k_QGD.transpose(0, 1)), dim=1)
    values_GCD = torch.cat((v_GTD, padding_GTD, v_QGD.transpose(0, 1)), dim=1)
    kernel = _compiled_flex() if compiled else flex_kernel
    out_1HQD = kernel(
        q_QHD.transpose(0, 1)[None], keys_GCD[None], values_GCD[None], block_mask=seen.derived[key], enable_gqa=H > G
    )
    return out_1HQD[0].transpose(0, 1)[: N * K].unflatten(0, (N, K))


def _flex_padding(N: int, K: int, T: int) -> tuple[int, int]:
    """Blocks and context tokens to add so that N * K and T are multiples of FLEX_TILE, N * K two tiles at least.

    One tile of queries would be a size of 1 in the block mask, for which torch compiles everything once more.
    """
    step = FLEX_TILE // gcd(FLEX_TILE, K)
    steps = max(-(-N // step), -(-2 * FLEX_TILE // (step * K)))
    return steps * step - N, -T % FLEX_TILE


def _flex_mask(seen: Seen, K: int, T: int, window: int | None, device: torch.device, compiled: bool) -> BlockMask:
    """The block mask of [context | all blocks]. Compiled, the mask of all queries by all keys is never stored.

    The mask function reads the lengths from tensors, not from integers, which would be compiled into it.
    """
    N = len(seen.start_N)
    more_N, more_T = _flex_padding(N, K, T)
    nothing = seen.start_N.new_zeros(more_N)
    start_N = torch.cat((seen.start_N, nothing)).to(device)
    end_N = torch.cat((seen.end_N, nothing)).to(device)
    own_N = (T + more_T + torch.arange(N + more_N) * K).to(device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // K, query % K
        in_context = (key >= start_N[block]) & (key < end_N[block])
        own = key - own_N[block]
        in_block = (own >= 0) & (own < K)
        if window is None:
            return in_context | in_block
        in_context = in_context & (end_N[block] + slot - key < window)
        return in_context | (in_block & (own <= slot) & (slot - own < window))

    make = _compiled_block_mask() if compiled else create_block_mask
    queries = (N + more_N) * K
    return make(visible, None, None, queries, T + more_T + queries, device=device, BLOCK_SIZE=FLEX_TILE)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_kernel, dynamic=True)


@cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=True)
