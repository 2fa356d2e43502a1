"""Attention by the C kernel against the whole mask: exactness, threads, and where split attention takes its place."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, attended, error, random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from ops.lib.drafts.attention.blocks import ContextRange, dense_attention, kernel_attention, split_attention
from ops.lib.drafts.attention.cpu_attention import compiled_attention

needs_kernel = pytest.mark.skipif(compiled_attention(16)[1] is None, reason="no C compiler for this processor")


@needs_kernel
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize(("K", "G", "R", "D"), [(2, 1, 4, 16), (5, 3, 1, 48), (8, 2, 2, 64), (16, 2, 2, 32)])
@pytest.mark.parametrize("sorted_blocks", [True, False])
def test_kernel_attention_has_the_values_and_gradients_of_the_dense_mask(sorted_blocks, K, G, R, D, window):
    case = random_case(K, sorted_blocks, K=K, G=G, R=R, D=D, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(kernel_attention, case, torch.float32)) < 5e-6


@needs_kernel
@pytest.mark.parametrize("window", [None, 5, 90])
@pytest.mark.parametrize("D", [16, 128])
def test_blocks_longer_than_a_chunk_of_keys_and_a_tile_of_rows_are_exact(D, window):
    case = Case((0, 10, 10, 0), (10, 150, 40, 0), T=160, K=70, G=1, R=3, D=D, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(kernel_attention, case, torch.float32)) < 5e-6


@needs_kernel
@settings(max_examples=40, derandomize=True)
@given(
    spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), min_size=1, max_size=24),
    K=st.integers(2, 16),
    R=st.sampled_from([1, 2, 3, 4]),
    window=st.none() | st.integers(1, 120),
)
def test_kernel_attention_is_exact_for_any_blocks(spans, K, R, window):
    starts = tuple(90 * sample for sample, _ in spans)
    ends = tuple(90 * sample + length for sample, length in spans)
    case = Case(starts, ends, T=275, K=K, R=R, D=16, window=window)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(kernel_attention, case, torch.float32)) < 5e-6


@needs_kernel
def test_the_kernel_computes_its_layer_twice_under_activation_checkpointing():
    case = random_case(4, True, K=5, G=2, R=2, D=32, window=None)

    def twice(*arguments):
        return checkpoint(kernel_attention, *arguments, use_reentrant=False)

    expected = attended(kernel_attention, case, torch.float32)
    assert all(
        torch.equal(one, other) for one, other in zip(expected, attended(twice, case, torch.float32), strict=True)
    )


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_kernel
def test_kernel_attention_gives_the_same_bits_on_one_and_two_threads(two_threads):
    case = random_case(10, K=16, G=3, D=32, window=40)
    two = attended(kernel_attention, case, torch.float32)
    torch.set_num_threads(1)
    one = attended(kernel_attention, case, torch.float32)
    assert [True] * 6 == [torch.equal(a, b) for a, b in zip(one, two, strict=True)]


@needs_kernel
def test_kernel_attention_takes_any_strides():
    case = random_case(11, K=8, D=16)
    strided = [torch.stack((x, -x), dim=-1)[..., 0] for x in case.inputs(torch.float32)]
    with torch.no_grad():
        expected = dense_attention(*case.inputs(torch.float64), case.seen(), None)
        actual = kernel_attention(*strided, case.seen(), None)
    assert error([expected], [actual.double()]) < 5e-6


@needs_kernel
def test_a_query_that_is_not_a_number_gives_none():
    case = random_case(12, K=8, D=16)
    with torch.no_grad():
        inputs = case.inputs(torch.float32)
        inputs[0][3, 5, 2, 7] = torch.nan
        out_NKHD = kernel_attention(*inputs, case.seen(), None)
    expected = torch.zeros(out_NKHD.shape, dtype=torch.bool)
    expected[3, 5, 2] = True
    assert torch.equal(expected, out_NKHD.isnan())


@needs_kernel
def test_kernel_attention_refuses_what_it_would_read_outside_its_inputs():
    case = random_case(13, K=8, D=16)
    q, k_own, v_own, k, v = case.inputs(torch.float32)
    with pytest.raises(IndexError, match="280 tokens of context"):
        kernel_attention(q, k_own, v_own, k, v, ContextRange(case.seen().start_N, case.seen().end_N + 10), None)
    with pytest.raises(ValueError, match="do not fit"):
        kernel_attention(q, k_own, v_own[:, :7], k, v, case.seen(), None)


@pytest.fixture
def fresh_kernel():
    compiled_attention.cache_clear()
    yield
    compiled_attention.cache_clear()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_where_the_kernel_cannot_be_compiled_split_attention_takes_its_place(fresh_kernel, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    case = random_case(14, K=8, D=16)
    expected = attended(split_attention, case, torch.float32)
    actual = attended(kernel_attention, case, torch.float32)
    assert [True] * 6 == [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]


@pytest.mark.parametrize(("dtype", "D"), [(torch.float64, 16), (torch.bfloat16, 16), (torch.float32, 8)])
def test_other_dtypes_and_head_sizes_go_to_split_attention(dtype, D):
    case = random_case(15, K=8, D=D)
    expected = attended(split_attention, case, dtype)
    actual = attended(kernel_attention, case, dtype)
    assert [True] * 6 == [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]


def test_more_threads_than_heads_take_split_attention(two_threads):
    case, seen = random_case(16, K=4, G=1, D=16), random_case(16, K=4).seen()
    kernel_attention(*case.inputs(torch.float32), seen, None)
    assert ["split"] == [key[0] for key in seen.derived]
