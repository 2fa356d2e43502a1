"""Prompts of different lengths in one forward pass of the target: padding on the left spoils nothing."""

from __future__ import annotations

import pytest
import torch
from batch_cases import family_case
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from ops.lib.target.cache import own_cache
from ops.lib.target.prefill import mask_with_diagonal, prefill

pytestmark = pytest.mark.filterwarnings("ignore:.*fast path is not available")


@pytest.fixture(scope="module", params=["qwen3", "qwen3_vl", "qwen3_5"])
def case(request, tmp_path_factory):
    return family_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def softmax_over_nothing_is_nan():
    """sdpa as some kernels have it: a query that sees no key gives NaN."""

    def strict(module, query, key, value, attention_mask, **others):
        mixed, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        if attention_mask is not None:
            blind_B1Q = ~attention_mask.any(-1)
            mixed = mixed.masked_fill(blind_B1Q.transpose(1, 2)[..., None], float("nan"))
        return mixed, weights

    before = AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", strict)
    yield
    AttentionInterface.register("sdpa", before)


def assert_padding_changes_nothing(target, samples):
    with torch.no_grad():
        batch = prefill(target, target.prompts(samples), own_cache(target))
        alone = [prefill(target, target.prompts([sample]), own_cache(target)) for sample in samples]
    assert 2 < len({len(sample.input_ids) for sample in samples})
    torch.testing.assert_close(batch.logits_BV, torch.cat([one.logits_BV for one in alone]), rtol=1e-3, atol=1e-4)
    for layer, *ones in zip(batch.cache.layers, *(one.cache.layers for one in alone), strict=True):
        if not hasattr(layer, "keys"):  # linear attention keeps a state
            continue
        for name in ("keys", "values"):
            padded = getattr(layer, name)
            assert bool(padded.isfinite().all())
            for row, one in enumerate(ones):
                real = getattr(one, name)[0]
                torch.testing.assert_close(padded[row][:, -real.shape[1] :], real, rtol=1e-3, atol=1e-4)


def test_where_a_softmax_over_nothing_is_nan_padding_spoils_no_prompt(case, softmax_over_nothing_is_nan):
    assert_padding_changes_nothing(*case)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_padding_spoils_no_prompt_with_any_kernel_of_this_machine(case, backend):
    with sdpa_kernel(backend):
        assert_padding_changes_nothing(*case)


MASKS = [causal_mask_function, sliding_window_causal_mask_function(3)]
PLACES = [{"q_length": 6, "kv_length": 6}, {"q_length": 2, "kv_length": 6, "q_offset": 4}]


def both_masks(attention_mask, **sizes):
    """Ours, as transformers calls it, and its own."""
    sizes |= {"batch_size": 2, "attention_mask": attention_mask, "device": "cpu"}
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**sizes), sdpa_mask(**sizes)


@pytest.mark.parametrize("mask_function", MASKS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("padding", [1, 2])
def test_a_mask_whose_rows_all_see_something_is_that_of_transformers(mask_function, place, padding):
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is mask_with_diagonal
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 6 - padding :] = False  # on the right, as in capture and training
    for attention_mask in (real, None):
        ours, theirs = both_masks(attention_mask, mask_function=mask_function, allow_is_causal_skip=False, **place)
        assert bool(theirs.any(-1).all())
        assert torch.equal(theirs, ours)


def test_where_transformers_makes_no_mask_there_is_none():
    for attention_mask in (None, torch.ones(2, 6, dtype=torch.bool)):
        assert (None, None) == both_masks(attention_mask, q_length=6, kv_length=6)


@pytest.mark.parametrize("mask_function", MASKS)
def test_of_a_row_that_sees_nothing_only_its_diagonal_is_set(mask_function):
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, :3] = False
    ours, theirs = both_masks(real, mask_function=mask_function, q_length=6, kv_length=6)
    expected = theirs.clone()
    for place in range(3):
        assert not theirs[1, 0, place].any()
        expected[1, 0, place, place] = True
    assert torch.equal(expected, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mask_function", MASKS)
def test_an_added_mask_is_that_of_transformers_but_for_rows_that_see_nothing(mask_function, dtype):
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, :3] = False
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "device": "cpu", "dtype": dtype}
    sizes |= {"mask_function": mask_function, "attention_mask": real}
    ours, theirs = ALL_MASK_ATTENTION_FUNCTIONS["eager"](**sizes), eager_mask(**sizes)
    expected = theirs.clone()
    for place in range(3):
        assert bool((theirs[1, 0, place] == torch.finfo(dtype).min).all())
        expected[1, 0, place, place] = 0.0
    assert torch.equal(expected, ours)
    assert expected.dtype is ours.dtype


def test_where_transformers_adds_no_mask_there_is_none():
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "allow_is_bidirectional_skip": True}
    sizes["mask_function"] = bidirectional_mask_function
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"](**sizes) is eager_mask(**sizes) is None
