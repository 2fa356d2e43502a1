"""Attention of blocks on the CPU: unmasked products with the context that many rows share, small masks for the rest.

Blocks in the order of what they see are cut into buckets. The context that all rows of a bucket see (its core) is
attended without a mask, the ragged edges on both sides of it with a small one, the own blocks as a batch of small
problems, all by torch's flash attention for the CPU; the parts are merged by their log-sum-exp. Given the merged
output and log-sum-exp, that kernel's backward of every part is exact, because a weight is exp(score - log-sum-exp)
whichever part the key belongs to.
Source of the merge: FlashAttention, arXiv 2205.14135, section 3.1.

Legend: T packed context tokens, N blocks, B blocks of a bucket, K block size, H query heads, G key/value heads,
R = H / G, D head size, X = B * K * R rows of a bucket per key/value head, E tokens of an edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.sequence_parallel.context_range import ContextRange

BUCKET_ROWS = 512  # rows (block, slot, query head) of a bucket per key/value head: 16 blocks of 16 slots and R = 2
BUCKET_SPREAD = 512  # tokens between the ends of a bucket's blocks: sparse anchors would make wide masked edges

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def split_attention(
    q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor, k_GTD: Tensor, v_GTD: Tensor, seen: ContextRange, window: int | None
) -> Tensor:
    """Attention of blocks to context and themselves, bucket by bucket; [N, K, H, D]. CPU only, all float types.

    The backward pass needs only the inputs, the output and the log-sum-exp [G, N * K * R]. Temporary memory is that of
    one bucket: a few [G, X, D], and masks [X, E]. The cost is that of the visible scores, plus BUCKET_ROWS / (K * R) -
    1 gaps between anchors per query.
    """
    return _Split.apply(q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD, seen, window)


@frozen(eq=False)
class Edge:
    """The part [low, high) of the context that only some rows of a bucket see.

    bias: 0 or -inf; [B, high - low] where all slots of a block see the same, else [B * K, high - low].
    """

    low: int
    high: int
    bias: Tensor

    def mask(self, rows: int) -> Tensor:
        """The bias for every row, [X, E]. It is made only when needed, since it is as large as the scores
        of one head.
        """
        lines, width = self.bias.shape
        return self.bias[:, None].expand(lines, rows // lines, width).reshape(rows, width)


@frozen(eq=False)
class Bucket:
    """Blocks whose attention is computed together. core: the context that every row sees.

    blocks: their indices, a slice if they are sorted. rows: where their rows lie in sorted order.
    """

    blocks: slice | Tensor
    rows: slice
    core: tuple[int, int]
    edges: tuple[Edge, ...]

    def parts(self) -> Iterator[tuple[slice, Tensor | None]]:
        """The parts of the visible context, core and edges, as slices with their masks; the core has none."""
        if self.core[0] < self.core[1]:
            yield slice(*self.core), None
        for edge in self.edges:
            yield slice(edge.low, edge.high), edge.mask(self.rows.stop - self.rows.start)


def _plan(seen: ContextRange, K: int, R: int, window: int | None, dtype: torch.dtype) -> list[Bucket]:
    """The buckets: blocks sorted by (start, end), cut at a change of sample, at BUCKET_ROWS rows and BUCKET_SPREAD
    tokens.
    """
    N = len(seen.start_N)
    if N == 0:
        return []
    order_N = torch.argsort(seen.start_N * (int(seen.end_N.max()) + 1) + seen.end_N, stable=True)
    is_sorted = torch.equal(order_N, torch.arange(N))
    start_N, end_N = seen.start_N[order_N], seen.end_N[order_N]
    cuts = _cuts(start_N.tolist(), end_N.tolist(), max(1, BUCKET_ROWS // (K * R)))
    buckets = []
    for low, high in zip(cuts, [*cuts[1:], N], strict=True):
        blocks = slice(low, high) if is_sorted else order_N[low:high]
        first, last = start_N[low:high, None], end_N[low:high, None]
        if window is not None:
            first = torch.maximum(first, last + torch.arange(K) - window + 1).minimum(last)
        core, edges = _core_and_edges(first.reshape(-1, 1), last.expand_as(first).reshape(-1, 1), dtype)
        buckets.append(Bucket(blocks, slice(low * K * R, high * K * R), core, edges))
    return buckets


def _cuts(starts: list[int], ends: list[int], most: int) -> list[int]:
    """The indices of the sorted blocks at which buckets begin."""
    cuts = [0]
    for n in range(1, len(starts)):
        low = cuts[-1]
        if starts[n] != starts[low] or n - low == most or ends[n] - ends[low] > BUCKET_SPREAD:
            cuts.append(n)
    return cuts


def _core_and_edges(first: Tensor, last: Tensor, dtype: torch.dtype) -> tuple[tuple[int, int], tuple[Edge, ...]]:
    """The common part of all intervals [first, last), int64 [lines, 1], and the edges around it."""
    core = int(first.max()), int(last.min())
    low, high = int(first.min()), int(last.max())
    edges = []
    for begin, end in [(low, core[0]), (core[1], high)] if core[0] < core[1] else [(low, high)]:
        if begin < end:
            token_E = torch.arange(begin, end)
            hidden = (token_E < first) | (token_E >= last)
            edges.append(Edge(begin, end, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))))
    return core, tuple(edges)


def _own_bias(K: int, R: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """The additive mask [K * R, K] of a block over itself; None where every slot sees every slot."""
    if window is None:
        return None
    behind_KK = torch.arange(K)[:, None] - torch.arange(K)
    hidden_KK = (behind_KK < 0) | (behind_KK >= window)
    return torch.zeros(K, K, dtype=dtype).masked_fill_(hidden_KK, float("-inf")).repeat_interleave(R, dim=0)


class _Split(torch.autograd.Function):
    """The autograd function of split_attention.

    Flash attention's backward of a part is exact if it gets the merged output and log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NKHD: Tensor,
        k_NKGD: Tensor,
        v_NKGD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        seen: ContextRange,
        window: int | None,
    ) -> Tensor:
        N, K, H, D = q_NKHD.shape
        G = k_GTD.shape[0]
        R = H // G
        key = ("split", K, R, window, q_NKHD.dtype)
        if key not in seen.derived:
            seen.derived[key] = _plan(seen, K, R, window, q_NKHD.dtype)
        own_bias = _own_bias(K, R, window, q_NKHD.dtype)
        k_NKGD, v_NKGD, k_GTD, v_GTD = (_rows(x) for x in (k_NKGD, v_NKGD, k_GTD, v_GTD))
        out_NKHD = q_NKHD.new_empty(N, K, H, D)
        lse_GX = q_NKHD.new_empty(G, N * K * R, dtype=_wide(q_NKHD.dtype))
        for bucket in seen.derived[key]:
            q_GXD = _fold(q_NKHD, bucket, G)
            own = _flash(_per_block(q_GXD, K * R), _slots(k_NKGD, bucket), _slots(v_NKGD, bucket), attn_mask=own_bias)
            outs = [own[0].transpose(0, 1).flatten(1, 2)]
            lses = [own[1].transpose(0, 1).flatten(1, 2)]
            for tokens, bias_XE in bucket.parts():
                kv = (x_GTD[None, :, tokens] for x_GTD in (k_GTD, v_GTD))
                out_1GXD, lse_1GX = _flash(q_GXD[None], *kv, attn_mask=bias_XE)
                outs.append(out_1GXD[0])
                # The kernel gives 0 as the log-sum-exp of a row that sees nothing of an edge; it is -inf.
                lses.append(lse_1GX[0] if bias_XE is None else lse_1GX[0] + bias_XE.amax(1))
            out_GXD, lse_GX[:, bucket.rows] = _merge(outs, lses)
            _unfold(out_GXD, out_NKHD, bucket)
        ctx.save_for_backward(q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD, out_NKHD, lse_GX)
        ctx.buckets, ctx.own_bias = seen.derived[key], own_bias
        return out_NKHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NKHD: Tensor) -> tuple[Tensor | None, ...]:
        q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD, out_NKHD, lse_GX = ctx.saved_tensors
        G, T, D = k_GTD.shape
        wide, KR = _wide(q_NKHD.dtype), q_NKHD.shape[1] * q_NKHD.shape[2] // G
        grad_q, grad_k_own, grad_v_own = (x.new_empty(x.shape) for x in (q_NKHD, k_NKGD, v_NKGD))
        # The kernel's gradients lie as [T, G, D] in memory: sums in the same layout are contiguous.
        grad_k, grad_v = (q_NKHD.new_zeros(T, G, D, dtype=wide).transpose(0, 1) for _ in range(2))
        for bucket in ctx.buckets:
            q_GXD, out_GXD, grad_GXD = (_fold(x, bucket, G) for x in (q_NKHD, out_NKHD, grad_NKHD))
            lse_BGX = _per_block(lse_GX[:, bucket.rows], KR)
            own_q, own_k, own_v = _flash_backward(
                _per_block(grad_GXD, KR),
                _per_block(q_GXD, KR),
                _slots(k_NKGD, bucket),
                _slots(v_NKGD, bucket),
                _per_block(out_GXD, KR),
                lse_BGX,
                0.0,
                False,
                attn_mask=ctx.own_bias,
            )
            grad_k_own[bucket.blocks] = own_k.transpose(1, 2)
            grad_v_own[bucket.blocks] = own_v.transpose(1, 2)
            grad_q_GXD = own_q.transpose(0, 1).flatten(1, 2).to(wide)
            for tokens, bias_XE in bucket.parts():
                part_q, part_k, part_v = _flash_backward(
                    grad_GXD[None],
                    q_GXD[None],
                    k_GTD[None, :, tokens],
                    v_GTD[None, :, tokens],
                    out_GXD[None],
                    lse_GX[None, :, bucket.rows],
                    0.0,
                    False,
                    attn_mask=bias_XE,
                )
                grad_q_GXD += part_q[0]
                grad_k[:, tokens] += part_k[0]
                grad_v[:, tokens] += part_v[0]
            _unfold(grad_q_GXD, grad_q, bucket)
        return grad_q, grad_k_own, grad_v_own, grad_k.to(k_GTD.dtype), grad_v.to(v_GTD.dtype), None, None


def _rows(x: Tensor) -> Tensor:
    """The tensor, copied if a head's vectors are not contiguous; the kernel accepts all other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fold(x_NKHD: Tensor, bucket: Bucket, G: int) -> Tensor:
    """A bucket's rows as contiguous [G, X, D]; X joins slots and the query heads that share a key/value head."""
    x_BKHD = x_NKHD[bucket.blocks]
    B, K, H, D = x_BKHD.shape
    return x_BKHD.reshape(B, K, G, H // G, D).permute(2, 0, 1, 3, 4).reshape(G, B * K * (H // G), D).contiguous()


def _unfold(x_GXD: Tensor, into_NKHD: Tensor, bucket: Bucket) -> None:
    """The inverse of _fold, written into contiguous [N, K, H, D]."""
    N, K, H, D = into_NKHD.shape
    G = x_GXD.shape[0]
    x_BKGRD = x_GXD.view(G, -1, K, H // G, D).permute(1, 2, 0, 3, 4)
    into_NKHD.view(N, K, G, H // G, D)[bucket.blocks] = x_BKGRD.to(into_NKHD.dtype)


def _per_block(x_GX: Tensor, KR: int) -> Tensor:
    """A view of [G, B * K * R, ...] as a batch of blocks, [B, G, K * R, ...]."""
    return x_GX.view(x_GX.shape[0], -1, KR, *x_GX.shape[2:]).transpose(0, 1)


def _slots(x_NKGD: Tensor, bucket: Bucket) -> Tensor:
    """A bucket's own keys or values as a batch of blocks [B, G, K, D]."""
    return x_NKGD[bucket.blocks].transpose(1, 2)


def _merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys: output [G, X, D] and log-sum-exp [G, X] over all keys."""
    lse_GX = lses[0]
    for part_GX in lses[1:]:
        lse_GX = torch.logaddexp(lse_GX, part_GX)
    out_GXD = outs[0] * (lses[0] - lse_GX).exp_()[..., None]
    for part_GXD, part_GX in zip(outs[1:], lses[1:], strict=True):
        out_GXD.addcmul_(part_GXD, (part_GX - lse_GX).exp_()[..., None])
    return out_GXD, lse_GX


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which scores, merges and sums of gradients are held."""
    return torch.promote_types(dtype, torch.float32)
