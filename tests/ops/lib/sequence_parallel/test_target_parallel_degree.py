"""Degrees that a target cannot take are refused in words, before anything runs; attention and mask of one process."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from target_parallel_cases import BATCHES, batch_of, model_of
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dsl.errors import ConfigError
from ops.lib.sequence_parallel.degree import check_target_degree
from ops.lib.sequence_parallel.target import ParallelTarget, answer_tokens, wanted_tokens
from ops.lib.sequence_parallel.target_attention import ULYSSES, is_right_padded, ulysses_mask
from ops.lib.target.model import Target

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def message_of(config, *, world_size=4, sp_degree=2):
    with pytest.raises(ConfigError) as raised:
        check_target_degree(config, world_size=world_size, sp_degree=sp_degree)
    return str(raised.value)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_degrees_that_divide_the_heads_are_taken_and_key_value_heads_are_repeated(degree):
    check_target_degree({"text_config": HEADS}, world_size=8, sp_degree=degree)
    check_target_degree(HEADS, world_size=8, sp_degree=degree)


def test_heads_that_no_repetition_fits_are_refused_with_the_degrees_that_do():
    message = message_of({"num_attention_heads": 12, "num_key_value_heads": 4}, world_size=8, sp_degree=8)
    assert "need 8 key/value heads (lcm of 4 and 8), which do not divide the target's 12 attention heads" in message
    assert "possible degrees are 1, 2, 3, 4, 6, 12" in message


def test_ranks_that_are_no_multiple_of_the_degree_and_everything_else_are_listed_at_once():
    config = {**HEADS, "rope_scaling": {"type": "dynamic"}, "layer_types": ["linear_attention"]}
    message = message_of(config, world_size=4, sp_degree=3)
    for part in ("mesh of dp 2 x sp 3", "linear_attention", "lcm of 2 and 3", 'rope_type "dynamic"'):
        assert part in message


@pytest.mark.parametrize("degree", [0, -1])
def test_a_degree_below_one_is_refused(degree):
    assert f"must be at least 1, got {degree}" in message_of(HEADS, sp_degree=degree)


@pytest.mark.parametrize(
    "layers",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"full_attention_interval": 4},
        {"linear_num_key_heads": 2},
    ],
    ids=str,
)
def test_layers_that_no_slice_can_compute_are_refused_by_their_types(layers):
    assert "layer_types hold" in message_of({"text_config": {**HEADS, **layers}})
    check_target_degree({"text_config": {**HEADS, **layers}}, world_size=4, sp_degree=1)


def test_a_hybrid_target_is_refused_before_any_process_group_is_asked_for():
    target = Target(copy.deepcopy(model_of("qwen3_5")), {}, torch.device("cpu"))
    with pytest.raises(ConfigError, match="linear_attention"):
        ParallelTarget.make(target, world_size=2, rank=0, sp_degree=2, device="cpu", dtype=torch.float32)


def test_the_check_needs_no_torch():
    code = "import ops.lib.sequence_parallel.degree, sys; sys.exit('torch' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code]).returncode


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_a_pass_that_was_not_cut_is_that_of_sdpa_with_a_cache_too(family):
    expected_model, model = (copy.deepcopy(model_of(family)) for _ in range(2))
    vision = {"vision_config": "sdpa", "text_config": ULYSSES}
    model.set_attn_implementation(ULYSSES if family == "qwen3" else vision)
    batch = batch_of("left")
    logits = []
    for one in (expected_model, model):
        cache = DynamicCache(config=one.config.get_text_config())
        arguments = {"attention_mask": batch.attention_mask, "past_key_values": cache, "use_cache": True}
        prompt = one(input_ids=batch.input_ids[:, :-2], **{**arguments, "attention_mask": batch.attention_mask[:, :-2]})
        rest = one(input_ids=batch.input_ids[:, -2:], **arguments)
        logits.append(torch.cat([prompt.logits, rest.logits], dim=1))
    assert torch.equal(*logits)


def test_the_mask_of_a_slice_is_that_of_the_whole_sequence():
    mask = batch_of("left").attention_mask.bool()
    sizes = {"batch_size": len(mask), "kv_length": mask.shape[1], "attention_mask": mask}
    whole = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](q_length=mask.shape[1], **sizes)
    assert torch.equal(whole, ulysses_mask(q_length=6, **sizes))


def test_every_batch_of_the_parity_test_has_to_be_padded_for_its_slices():
    kinds = sorted({kind for kinds in BATCHES.values() for kind in kinds})
    assert {"images": 1, "left": 1, "mixed": 1, "text": 1} == {
        kind: batch_of(kind).input_ids.shape[1] % 2 for kind in kinds
    }


def test_padding_on_the_right_needs_no_mask():
    mask = batch_of("text").attention_mask.bool()
    assert is_right_padded(mask)
    assert not is_right_padded(batch_of("left").attention_mask)
    assert ulysses_mask(q_length=6, kv_length=mask.shape[1], batch_size=len(mask), attention_mask=mask) is None


@pytest.mark.parametrize("kind", ["text", "left", "mixed"])
def test_the_slices_of_all_ranks_predict_every_answer_token_once(kind):
    batch = batch_of(kind)
    S = batch.input_ids.shape[1]
    parts = [wanted_tokens(batch, start, min(start + 6, S)) for start in range(0, S, 6)]
    wanted_BS = torch.cat([wanted for wanted, _ in parts], dim=1)
    assert torch.equal(batch.loss_mask[:, 1:], wanted_BS[:, :-1])
    assert not wanted_BS[:, -1].any()
    expected = sorted(batch.input_ids[:, 1:][batch.loss_mask[:, 1:]].tolist())
    assert expected == sorted(torch.cat([labels for _, labels in parts]).tolist())
    assert len(expected) == answer_tokens(batch)


def test_one_process_without_a_sample_has_no_loss_and_zero_gradients():
    target = Target(copy.deepcopy(model_of("qwen3_vl")), {}, torch.device("cpu"))
    parallel = ParallelTarget.make(target, world_size=1, rank=0, sp_degree=1, device="cpu", dtype=torch.float32)
    loss = parallel.answer_loss(None)
    loss.backward()
    assert 0 == float(loss.detach())
    gradients = [parameter.grad for parameter in target.model.get_decoder().parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_ranks_share_the_attention_of_qwens_families_only():
    with pytest.raises(
        ConfigError, match="sp_degree: the attention of a gpt_oss is not that of Qwen's families, which"
    ):
        check_target_degree({**HEADS, "model_type": "gpt_oss"}, world_size=2, sp_degree=2)
    check_target_degree({**HEADS, "model_type": "gpt_oss"}, world_size=2, sp_degree=1)
