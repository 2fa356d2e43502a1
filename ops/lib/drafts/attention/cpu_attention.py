"""Attention of blocks on the CPU by one C kernel, cpu_attention.c, for float32; all else goes to `split_attention`.

The kernel is compiled for a head size on first use in a process. A call computes some key/value heads for all blocks,
so that heads are divided over torch's threads and no two threads add to the same number: the result does not depend
on the number of threads.

Legend: T packed context tokens, N blocks, K block size, H query heads, G key/value heads, R = H / G, D head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pkgutil import get_data
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.drafts.attention.bucketed_attention import split_attention
from ops.lib.kernels.c_library import compiled_library
from ops.lib.sequence_parallel.context_range import ContextRange

HEAD_SIZES = range(16, 129, 16)

INPUTS = ("q", "own_k", "own_v", "k", "v", "start", "end", "order", "out", "lse")
GRADIENTS = ("grad", "grad_q", "grad_own_k", "grad_own_v", "grad_k", "grad_v")
SIZES = ("blocks", "K", "G", "R", "T", "window", "k_head", "k_token", "v_head", "v_token")


class Problem(ctypes.Structure):
    """The C structure Problem of cpu_attention.c: data pointers, sizes, and the strides of the context."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in INPUTS + GRADIENTS) + tuple(
        (name, ctypes.c_int64) for name in SIZES
    )


def kernel_attention(
    q_NKHD: Tensor, k_NKGD: Tensor, v_NKGD: Tensor, k_GTD: Tensor, v_GTD: Tensor, seen: ContextRange, window: int | None
) -> Tensor:
    """Attention of blocks to context and themselves by the compiled C kernel; [N, K, H, D]. CPU only.

    `split_attention` replaces it without a compiler, for dtypes other than float32, head sizes outside HEAD_SIZES, and
    more threads than key/value heads. The backward pass needs only the inputs, the output and the log-sum-exp [G, N * K
    * R]. Each thread needs a temporary [T, D] twice, in the backward pass five times. Raises ValueError for shapes that
    do not match, and IndexError for blocks that see past the context.
    """
    inputs = (q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD)
    G, _, D = k_GTD.shape
    if not kernel_takes(functools.reduce(torch.promote_types, (x.dtype for x in inputs)), D, G):
        return split_attention(*inputs, seen, window)
    return _Fused.apply(*inputs, seen, window, compiled_attention(D)[1])


def kernel_takes(dtype: torch.dtype, head_dim: int, kv_heads: int) -> bool:
    """Whether the kernel supports such inputs; if so, it is compiled."""
    fits = dtype == torch.float32 and head_dim in HEAD_SIZES and torch.get_num_threads() <= kv_heads
    return fits and compiled_attention(head_dim)[1] is not None


@functools.cache
def compiled_attention(D: int) -> tuple[str, ctypes.CDLL | None]:
    """The compiler's name and the compiled library for head size D; without one, the reason and None. Cached.

    The library's functions `forward` and `backward` take a Problem and a range of key/value heads, [first, end). They
    return 0, or 1 if memory ran out.
    """
    name, library = compiled_library([get_data("ops.lib.drafts.attention", "cpu_attention.c")], f"-DD={D}")
    if library is not None:
        for function in (library.forward, library.backward):
            function.argtypes = [ctypes.POINTER(Problem), ctypes.c_int64, ctypes.c_int64]
            function.restype = ctypes.c_int
    return name, library


class _Fused(torch.autograd.Function):
    """The autograd function of kernel_attention, for inputs that the kernel supports."""

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
        library: ctypes.CDLL,
    ) -> Tensor:
        N, K, H, D = q_NKHD.shape
        G, T, _ = k_GTD.shape
        shapes = [tuple(x.shape) for x in (k_NKGD, v_NKGD, k_GTD, v_GTD)]
        if shapes != [(N, K, G, D), (N, K, G, D), (G, T, D), (G, T, D)] or H % G:
            raise ValueError(f"queries {tuple(q_NKHD.shape)} do not fit own and context's keys and values {shapes}")
        blocks = (x.contiguous() for x in (q_NKHD, k_NKGD, v_NKGD))
        context = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_GTD, v_GTD))
        out_NKHD, lse_GX = q_NKHD.new_empty(N, K, H, D), q_NKHD.new_empty(G, N * K * (H // G))
        tensors = (*blocks, *context, out_NKHD, lse_GX)
        _run(library.forward, _problem(tensors, seen, window))
        ctx.save_for_backward(*tensors)
        ctx.seen, ctx.window, ctx.library = seen, window, library
        return out_NKHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NKHD: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under checkpointing the second access is an error
        q_NKHD, k_NKGD, v_NKGD, k_GTD, *_ = saved
        G, T, D = k_GTD.shape
        grad_NKHD = grad_NKHD.contiguous()
        gradients = (torch.empty_like(q_NKHD), torch.zeros_like(k_NKGD), torch.zeros_like(v_NKGD))
        context = tuple(k_GTD.new_empty(T, G, D) for _ in range(2))
        problem = _problem(saved, ctx.seen, ctx.window)
        for name, x in zip(GRADIENTS, (grad_NKHD, *gradients, *context), strict=True):
            setattr(problem, name, x.data_ptr())
        _run(ctx.library.backward, problem)
        return *gradients, *(x_TGD.transpose(0, 1) for x_TGD in context), None, None, None


def _problem(tensors: tuple[Tensor, ...], seen: ContextRange, window: int | None) -> Problem:
    """The arguments of the C functions. tensors: q, own k and v, context k and v, output, log-sum-exp."""
    q_NKHD, _, _, k_GTD, v_GTD, *_ = tensors
    N, K, H, _ = q_NKHD.shape
    G, T, _ = k_GTD.shape
    if ("kernel", N, T) not in seen.derived:
        seen.derived["kernel", N, T] = _plan(seen, N, T)
    places = [x.data_ptr() for x in (*tensors[:5], *seen.derived["kernel", N, T], *tensors[5:])]
    sizes = [N, K, G, H // G, T, window or 0, *k_GTD.stride()[:2], *v_GTD.stride()[:2]]
    return Problem(*places, *[None] * len(GRADIENTS), *sizes)


def _plan(seen: ContextRange, N: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """The visible context [start_N, end_N) of each block, and the blocks sorted by both.

    So neighbouring rows of a tile see almost the same. Raises IndexError for an interval outside the context.
    """
    start_N, end_N = seen.start_N.contiguous(), seen.end_N.contiguous()
    inside_N = (start_N >= 0) & (start_N <= end_N) & (end_N <= T)
    if len(inside_N) != N or not bool(inside_N.all()):
        raise IndexError(f"{N} blocks and {T} tokens of context, but {len(inside_N)} intervals or some not inside it")
    return start_N, end_N, torch.argsort(start_N * (T + 1) + end_N, stable=True)


def _run(function: Callable[..., int], problem: Problem) -> None:
    """Run a C function for all key/value heads, divided over torch's threads. Raises MemoryError."""
    threads = max(1, min(torch.get_num_threads(), problem.G))
    cuts = [problem.G * i // threads for i in range(threads + 1)]

    def share(low: int, high: int) -> int:
        return function(ctypes.byref(problem), low, high)

    if threads == 1:
        failed = [share(0, problem.G)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            failed = list(pool.map(share, cuts[:-1], cuts[1:]))
    if any(failed):
        raise MemoryError("no memory for the attention's packed keys and values")
