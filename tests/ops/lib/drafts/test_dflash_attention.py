"""Attention over [context | own block]: the fast paths against the whole mask, and that against one query at a time.

Legend: T packed context tokens, N blocks, K block size, H query heads, G key/value heads, R = H / G, D head size.
"""

from __future__ import annotations

import random

import pytest
import torch
from attention_cases import Case, attended, error, random_case
from draft_cases import random_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.lib.drafts.attention.blocks import (
    choose_attention,
    dense_attention,
    flex_attention,
    kernel_attention,
    split_attention,
)
from ops.lib.drafts.attention.cpu_attention import compiled_attention
from ops.lib.drafts.backbone.config import DraftConfig

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_kernel = pytest.mark.skipif(compiled_attention(16)[1] is None, reason="no C compiler for this processor")
kernel = pytest.param(kernel_attention, marks=needs_kernel)
uncompiled_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


EXACT = [
    (split_attention, torch.float64, 1e-12),
    pytest.param(kernel_attention, torch.float32, 5e-6, marks=needs_kernel),
]


def query_by_query(case: Case) -> Tensor:
    """The definition, a query and a head at a time."""
    q_NKHD, k_NKGD, v_NKGD, k_GTD, v_GTD = (x.detach() for x in case.inputs(torch.float64))
    out_NKHD = torch.zeros_like(q_NKHD)
    for n, (start, end) in enumerate(zip(case.starts, case.ends, strict=True)):
        for k in range(case.K):
            position = end - start + k
            context = [(t - start, k_GTD[:, t], v_GTD[:, t]) for t in range(start, end)]
            own = [(end - start + j, k_NKGD[n, j], v_NKGD[n, j]) for j in range(case.K)]
            keys = [
                (key, value)
                for at, key, value in context + own
                if case.window is None or 0 <= position - at < case.window
            ]
            for h in range(q_NKHD.shape[2]):
                scores = torch.stack([q_NKHD[n, k, h] @ key[h // case.R] for key, _ in keys]) / case.D**0.5
                values = torch.stack([value[h // case.R] for _, value in keys])
                out_NKHD[n, k, h] = scores.softmax(0) @ values
    return out_NKHD


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_the_dense_mask_is_what_the_definition_says(window):
    case = Case((0, 0, 7, 0, 7), (5, 0, 12, 7, 7), T=14, K=4, D=4, window=window)
    actual = dense_attention(*case.inputs(torch.float64), case.seen(), window)
    assert error([query_by_query(case)], [actual.detach()]) < 1e-14


@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize(("K", "G", "R"), [(2, 1, 4), (5, 3, 1), (8, 2, 2), (16, 2, 4)])
@pytest.mark.parametrize("sorted_blocks", [True, False])
def test_split_attention_has_the_values_and_gradients_of_the_dense_mask(sorted_blocks, K, G, R, window):
    case = random_case(K, sorted_blocks, K=K, G=G, R=R, window=window)
    expected = attended(dense_attention, case, torch.float64)
    actual = attended(split_attention, case, torch.float64)
    assert error(expected, actual) < 1e-12


@settings(max_examples=40, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=24),
    K=st.integers(2, 16),
    R=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 60),
)
def test_split_attention_is_exact_for_any_blocks(spans, K, R, window):
    starts = tuple(40 * sample for sample, _ in spans)
    ends = tuple(40 * sample + length for sample, length in spans)
    case = Case(starts, ends, T=125, K=K, R=R, D=4, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(split_attention, case, torch.float64)) < 1e-12


@pytest.mark.parametrize(("attend", "dtype", "tolerance"), EXACT)
def test_anchors_far_from_each_other_are_exact(attend, dtype, tolerance):
    case = Case((0,) * 9, (0, 3, 700, 701, 1400, 1401, 1402, 2900, 2999), T=3000, K=4, D=16)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(attend, case, dtype)) < tolerance


@pytest.mark.parametrize(("attend", "dtype", "tolerance"), EXACT)
@pytest.mark.parametrize("spans", [([0], [0], 4), ([0, 0], [0, 0], 0), ([], [], 8)])
def test_no_context_and_no_blocks_give_numbers(spans, attend, dtype, tolerance):
    starts, ends, T = spans
    case = Case(tuple(starts), tuple(ends), T=T, K=4, D=16)
    expected = attended(dense_attention, case, torch.float64)
    actual = attended(attend, case, dtype)
    assert all(bool(x.isfinite().all()) for x in actual)
    assert error(expected, actual) < tolerance


@pytest.mark.parametrize("attend", [dense_attention, split_attention, kernel])
def test_context_that_nobody_sees_has_a_gradient_of_exactly_zero(attend):
    case = random_case(0, K=8, D=16)
    *_, grad_k_GTD, grad_v_GTD = attended(attend, case, torch.float32)
    assert 0 == torch.count_nonzero(grad_k_GTD[:, 271:]) + torch.count_nonzero(grad_v_GTD[:, 271:])
    assert bool((grad_v_GTD[:, :70].abs().amax((0, 2)) > 0).any())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [None, 24])
def test_split_attention_rounds_no_worse_than_its_dtype(dtype, tolerance, window):
    case = random_case(3, K=16, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(split_attention, case, dtype)) < tolerance


@pytest.mark.parametrize("attend", [split_attention, kernel])
def test_large_scores_do_not_overflow(attend):
    case = random_case(4, K=8, D=16)
    inputs = [60 * x.detach() for x in case.inputs(torch.float32)]
    expected = dense_attention(*(x.double() for x in inputs), case.seen(), None)
    actual = attend(*inputs, case.seen(), None)
    assert error([expected], [actual.double()]) < 1e-3


@pytest.mark.parametrize("attend", [split_attention, kernel])
def test_inputs_output_and_one_number_a_row_are_kept(attend):
    case = random_case(5, K=16, D=32)
    inputs = case.inputs(torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = attend(*inputs, case.seen(), None)
    rows = out.numel() // case.D
    allowed = sum(x.numel() for x in inputs) + out.numel() + rows
    assert allowed == sum(x.numel() for x in saved)


@pytest.mark.parametrize(
    ("attend", "D"), [(split_attention, 4), pytest.param(kernel_attention, 16, marks=needs_kernel)]
)
def test_no_tensor_is_as_large_as_a_mask_of_blocks_by_context(attend, D):
    N, T, K, G, R = 128, 4096, 4, 1, 4
    ends = tuple(range(T // N, T + 1, T // N))
    case = Case((0,) * N, ends, T=T, K=K, G=G, R=R, D=D)
    inputs = case.inputs(torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else (result,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return result

    seen = case.seen()
    with Watch():
        out = attend(*inputs, seen, None)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    rows_by_context = N * K * R * T * 4
    assert largest < rows_by_context // 16


def test_the_masks_of_split_attention_are_smaller_than_one_of_blocks_by_context():
    N, T = 128, 4096
    case = Case((0,) * N, tuple(range(T // N, T + 1, T // N)), T=T, K=4, G=1, R=4, D=4)
    seen = case.seen()
    split_attention(*case.inputs(torch.float32), seen, None)
    plan = sum(edge.bias.numel() for buckets in seen.derived.values() for bucket in buckets for edge in bucket.edges)
    assert 0 < plan < N * T // 4


@pytest.mark.parametrize(
    ("attend", "plans"), [(split_attention, 2), pytest.param(kernel_attention, 1, marks=needs_kernel)]
)
def test_the_plan_is_made_once_for_all_layers_of_a_window(attend, plans):
    case, seen = random_case(6, K=4, D=16), random_case(6, K=4).seen()
    for window in (None, 16, None, 16):
        attend(*case.inputs(torch.float32), seen, window)
    assert plans == len(seen.derived)


def draft_of(head_dim: int, kv_heads: int = 4) -> DraftConfig:
    return random_config(random.Random(0), {"num_key_value_heads": kv_heads, "head_dim": head_dim})


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    compiled_attention.cache_clear()
    yield
    compiled_attention.cache_clear()


@needs_kernel
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "expected"),
    [
        (torch.float32, 16, 4, ("kernel", kernel_attention)),
        (torch.bfloat16, 16, 4, ("split", split_attention)),
        (torch.float32, 24, 4, ("split", split_attention)),
        (torch.float32, 16, 1, ("split", split_attention)),
    ],
)
def test_a_cpu_takes_the_kernel_for_the_drafts_that_fit_it_and_else_split_attention(
    dtype, head_dim, kv_heads, expected, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert expected == choose_attention(torch.device("cpu"), draft_of(head_dim, kv_heads), dtype)


def test_a_cpu_without_a_compiler_takes_split_attention(without_compiler):
    assert ("split", split_attention) == choose_attention(torch.device("cpu"), draft_of(16), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_cuda_takes_flex_attention_for_heads_that_are_large_enough(dtype, head_dim):
    assert ("flex", flex_attention) == choose_attention(torch.device("cuda", 0), draft_of(head_dim), dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "sizes"),
    [
        (torch.bfloat16, 8, "bfloat16 and head_dim 8"),
        (torch.float32, 14, "float32 and head_dim 14"),
        (torch.float64, 128, "float64 and head_dim 128"),
    ],
)
def test_cuda_takes_the_dense_mask_for_what_flex_attention_does_not_take_and_says_why(dtype, head_dim, sizes):
    expected = f"dense (slow: FlexAttention does not take {sizes})"
    assert (expected, dense_attention) == choose_attention(torch.device("cuda", 0), draft_of(head_dim), dtype)


@uncompiled_flex
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize(("K", "G", "R"), [(16, 2, 2), (10, 2, 1), (5, 1, 4)])
def test_flex_attention_has_the_values_of_the_dense_mask(K, G, R, window):
    case = random_case(7, K=K, G=G, R=R, window=window)
    with torch.no_grad():
        expected = dense_attention(*case.inputs(torch.float64), case.seen(), window)
        actual = flex_attention(*case.inputs(torch.float32), case.seen(), window)
    assert error([expected], [actual.double()]) < 3e-6


@uncompiled_flex
@pytest.mark.parametrize(
    ("N", "K", "T", "shape"),
    [
        (128, 4, 128, (512, 128 + 512)),
        (3, 10, 130, (640, 256 + 640)),
        (1, 16, 5, (256, 128 + 256)),
        (2, 2, 0, (256, 256)),
    ],
)
def test_flex_attention_pads_queries_and_context_to_whole_tiles_and_two_of_queries(N, K, T, shape):
    case = Case((0,) * N, tuple(min(n, T) for n in range(N)), T=T, K=K)
    seen = case.seen()
    with torch.no_grad():
        flex_attention(*(x.detach() for x in case.inputs(torch.float32)), seen, None)
    (mask,) = seen.derived.values()
    assert (1, 1, *shape) == mask.shape


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("window", [None, 24])
def test_compiled_flex_attention_has_the_values_and_gradients_of_the_dense_mask(dtype, tolerance, window):
    for seed in (8, 9):
        case = random_case(seed, K=16, D=64, window=window)
        expected = attended(dense_attention, case, torch.float64)
        assert error(expected, attended(flex_attention, case, dtype, "cuda")) < tolerance


@pytest.mark.gpu
@needs_gpu
def test_flex_attention_is_compiled_once_for_all_lengths():
    torch._dynamo.reset()
    for seed, blocks in ((0, 20), (1, 33), (2, 57), (3, 90)):
        ends = torch.randint(0, 100 * blocks, (blocks,), generator=torch.Generator().manual_seed(seed)).tolist()
        case = Case((0,) * blocks, tuple(ends), T=100 * blocks, K=16, D=64)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            attended(flex_attention, case, torch.bfloat16, "cuda")
