"""Attention of blocks over [their context | themselves] in one softmax: the definition, and the choice of a fast path.

`dense_attention` makes the whole mask and defines the others, which have its signature and never make that mask:
`kernel_attention` and, without a C compiler, `split_attention` for the CPU, `flex_attention` for CUDA.

Block n sees the packed context positions [start_n, end_n) and its own K slots. Slot k is at position end_n - start_n +
k of its sample, context token t at t - start_n. Without a window all slots see all of that; with a window W a query at
p sees keys at j where 0 <= p - j < W, so that a block is causal in itself.
Source: DFlash, arXiv 2602.06036.

Legend: T packed context tokens, N blocks, K block size, H query heads, G key/value heads, R = H / G, D head size,
C = T + N * K keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ops.lib.drafts.attention.bucketed_attention import split_attention
from ops.lib.drafts.attention.cpu_attention import kernel_attention, kernel_takes
from ops.lib.drafts.attention.flex import flex_attention, flex_takes
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.kernels.device import to_device
from ops.lib.sequence_parallel.context_range import ContextRange

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, ContextRange, int | None], Tensor]


def choose_attention(device: torch.device, config: DraftConfig, dtype: torch.dtype) -> tuple[str, Attend]:
    """The fastest attention for a draft in this dtype on a device: its name for the log, and the function.

    On a CPU it is kernel or split, on CUDA flex or dense, elsewhere dense.
    """
    if device.type == "cuda":
        if flex_takes(dtype, config.head_dim):
            return "flex", flex_attention
        sizes = f"{str(dtype).removeprefix('torch.')} and head_dim {config.head_dim}"
        return f"dense (slow: FlexAttention does not take {sizes})", dense_attention
    if device.type != "cpu":
        return "dense", dense_attention
    if kernel_takes(dtype, config.head_dim, config.num_key_value_heads):
        return "kernel", kernel_attention
    return "split", split_attention


def dense_attention(
    q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor, k_GTD: Tensor, v_GTD: Tensor, seen: ContextRange, window: int | None
) -> Tensor:
    """Attention of blocks to context and themselves, with a full mask [N * K, T + N * K]; returns [N, K, H, D].

    It defines what the faster versions compute, on any device. Scores and softmax are at least float32; the cost is N K
    H (T + N K) scores.
    """
    N, K, _, D = q_NKHD.shape
    G, T, _ = k_GTD.shape
    mask_NKC = to_device(_visible(seen, K, T, window), q_NKHD.device)
    keys_GCD = torch.cat((k_GTD, k_NKGD.permute(2, 0, 1, 3).reshape(G, N * K, D)), dim=1)
    values_GCD = torch.cat((v_GTD, v_NKGD.permute(2, 0, 1, 3).reshape(G, N * K, D)), dim=1)
    scores = torch.einsum("nkgrd,gcd->nkgrc", q_NKHD.unflatten(2, (G, -1)), keys_GCD).to(
        torch.promote_types(q_NKHD.dtype, torch.float32)
    )
    scores = (scores * D**-0.5).masked_fill(~mask_NKC[:, :, None, None], float("-inf"))
    return torch.einsum("nkgrc,gcd->nkgrd", scores.softmax(-1).to(q_NKHD.dtype), values_GCD).flatten(2, 3)


def _visible(seen: ContextRange, K: int, T: int, window: int | None) -> Tensor:
    """A mask of the keys of [context | all blocks] that each query sees, bool [N, K, T + N * K]."""
    N = len(seen.start_N)
    start_N11, end_N11 = seen.start_N[:, None, None], seen.end_N[:, None, None]
    slot_K1, token_T = torch.arange(K)[:, None], torch.arange(T)
    context_NKT = ((token_T >= start_N11) & (token_T < end_N11)).expand(N, K, T)
    own_KK = torch.ones(K, K, dtype=torch.bool)
    if window is not None:
        context_NKT = context_NKT & (end_N11 + slot_K1 - token_T < window)
        behind_KK = slot_K1 - torch.arange(K)
        own_KK = (behind_KK >= 0) & (behind_KK < window)
    own_NKNK = torch.eye(N, dtype=torch.bool)[:, None, :, None] & own_KK[None, :, None, :]
    return torch.cat((context_NKT, own_NKNK.flatten(2)), dim=2)
