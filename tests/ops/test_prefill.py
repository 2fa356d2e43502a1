"""Prompts of different lengths in one forward pass of the target: padding on the left spoils nothing."""

from __future__ import annotations

import pytest
import torch
from batch_cases import family_case
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ops.dflash.prefill import prefill

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

    AttentionInterface.register("sdpa", strict)
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def assert_padding_changes_nothing(target, samples):
    with torch.no_grad():
        batch = prefill(target, target.prompts(samples))
        alone = [prefill(target, target.prompts([sample])) for sample in samples]
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
