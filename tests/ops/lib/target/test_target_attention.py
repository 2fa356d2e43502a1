"""The target's attention on a CPU reads the keys and values of a group once, and equals transformers' function."""

from __future__ import annotations

import pytest
import torch
from batch_cases import family_case
from rounding import assert_equal_within_rounding
from torch import nn
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ops.lib.target.attention import grouped_attention

B, H, G, D, C, ROOM = 3, 4, 2, 32, 37, 9


def arguments(dtype: torch.dtype, queries: int):
    """A layer, its queries, keys and values as a cache with room behind them holds them, and a mask."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Module()
    layer.num_key_value_groups = H // G
    q = torch.randn(B, queries, H, D, generator=generator).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(B, G, C + ROOM, D, generator=generator).to(dtype)[:, :, :C] for _ in range(2))
    mask = torch.rand(B, 1, queries, C, generator=generator) < 0.7
    mask[..., -1] = True
    return layer, q, keys, values, mask


@pytest.fixture
def copies(monkeypatch):
    """Counts the copies that transformers makes of keys or values."""
    made = []
    repeat = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *given: made.append(1) or repeat(*given))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 8, C])
def test_it_is_the_attention_of_transformers_without_its_copies(dtype, queries, copies):
    given = arguments(dtype, queries)
    with torch.no_grad():
        mixed, weights = grouped_attention(*given, scaling=0.2)
        assert (weights, copies) == (None, [])
        expected, _ = sdpa_attention_forward(*given, scaling=0.2)
    assert copies == [1, 1]
    assert mixed.shape == (B, queries, H, D)
    assert mixed.is_contiguous()
    assert_equal_within_rounding(expected, mixed, 2)


def test_without_a_mask_it_is_causal_as_in_transformers():
    given = (*arguments(torch.float32, C)[:-1], None)
    with torch.no_grad():
        assert torch.equal(grouped_attention(*given)[0], sdpa_attention_forward(*given)[0])


def test_training_gets_the_gradients_of_transformers_function(copies):
    layer, *tensors, mask = arguments(torch.float32, 8)
    for tensor in tensors:
        tensor.requires_grad_()
    ours = torch.autograd.grad(grouped_attention(layer, *tensors, mask)[0].square().sum(), tensors)
    assert copies == [1, 1]
    expected = torch.autograd.grad(sdpa_attention_forward(layer, *tensors, mask)[0].square().sum(), tensors)
    for gradient, wanted in zip(ours, expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_a_loaded_target_uses_it(tmp_path, copies):
    target, samples = family_case("qwen3", tmp_path)
    assert AttentionInterface()["sdpa"] is grouped_attention
    with torch.inference_mode():
        target.forward(target.prompts(samples))
    assert copies == []
