"""Texts that run through the target in chunks: states, features, logits and cache are those of one pass."""

from __future__ import annotations

import pytest
import torch
from cache_cases import CACHES, WINDOW, cache_case, cache_target, text_sample

from ops.capture_targets.backend import device_batch
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch
from ops.lib.target import chunked_prefill
from ops.lib.target.cache import own_cache, whole_cache
from ops.lib.target.chunked_prefill import chunk_length
from ops.lib.target.prefill import prefill
from ops.lib.target.sizes import MASK_BYTES, SCORE_BYTES
from ops.lib.target.verify import Verification

pytestmark = pytest.mark.filterwarnings("ignore:.*fast path is not available")
IN_CHUNKS = [name for name, (_, way) in CACHES.items() if way is Verification.BATCH]
LAYERS = (0, 2)
CHUNK = 5  # below the window, and no divisor of the lengths


@pytest.fixture
def chunks_of_five(monkeypatch):
    def use():
        monkeypatch.setattr(chunked_prefill, "MOST_BYTES", 1)
        monkeypatch.setattr(chunked_prefill, "LEAST_CHUNK", CHUNK)

    return use


def equal(one, other):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # parts of a model compute in float32


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_captured_states_are_those_of_one_pass(chunks_of_five, name):
    target, samples = cache_case(name)
    with torch.inference_mode():
        whole = [device_batch(target, [sample], LAYERS, final_hidden=True) for sample in samples]
        chunks_of_five()
        assert CHUNK == chunk_length(target, target.inputs(samples))
        features_BSF, final_BSM = device_batch(target, samples, LAYERS, final_hidden=True)
        again_BSF, _ = device_batch(target, samples, LAYERS)  # nothing is left of the batch before
    for row, (sample, (features, final)) in enumerate(zip(samples, whole, strict=True)):
        length = len(sample.input_ids)
        equal(features[0], features_BSF[row, :length])
        equal(final[0], final_BSM[row, :length])
        equal(features[0], again_BSF[row, :length])


@pytest.mark.parametrize("empty_cache", [own_cache, whole_cache])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_a_prefill_in_chunks_is_one_of_the_whole_prompts(chunks_of_five, name, empty_cache):
    target, samples = cache_case(name)
    with torch.inference_mode(), target.capture_inputs(LAYERS) as captured:
        expected = prefill(target, target.prompts(samples), empty_cache(target))
        features = captured.features()
        chunks_of_five()
        found = prefill(target, target.prompts(samples), empty_cache(target))
        equal(features[expected.mask_BS.bool()], captured.features()[expected.mask_BS.bool()])
    equal(expected.logits_BV, found.logits_BV)
    for one, other in zip(expected.cache.layers, found.cache.layers, strict=True):
        seen = expected.mask_BS[:, -one.keys.shape[2] :].bool()
        assert one.get_seq_length() == other.get_seq_length()
        for values, chunked in ((one.keys, other.keys), (one.values, other.values)):
            equal(values.transpose(1, 2)[seen], chunked.transpose(1, 2)[:, -seen.shape[1] :][seen])


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss eager"])
def test_answers_behind_a_chunked_prefill_are_the_same(chunks_of_five, name):
    target, samples = cache_case(name)
    expected = decode_plain_batch(target, samples, DecodeSettings(12))
    chunks_of_five()
    assert [one.tokens for one in expected] == [
        one.tokens for one in decode_plain_batch(target, samples, DecodeSettings(12))
    ]


def test_chunks_begin_where_masks_or_scores_need_more_than_the_limit(monkeypatch):
    long, short = text_sample("long", torch.full((64,), 5)), text_sample("short", torch.full((9,), 5))
    windowed, eager, plain = (cache_target(name) for name in ("mistral", "llama eager", "llama"))
    heads = eager.model.config.num_attention_heads
    monkeypatch.setattr(chunked_prefill, "LEAST_CHUNK", 1)
    for target, samples, size in (
        (windowed, [long], 64 * MASK_BYTES),
        (plain, [long, short], 2 * 64 * MASK_BYTES),
        (eager, [long], 64 * heads * SCORE_BYTES),
    ):
        monkeypatch.setattr(chunked_prefill, "MOST_BYTES", 64 * size)
        assert chunk_length(target, target.inputs(samples)) is None
        monkeypatch.setattr(chunked_prefill, "MOST_BYTES", 16 * size)
        assert 16 == chunk_length(target, target.inputs(samples))


def test_one_pass_takes_what_needs_no_mask_and_what_has_other_caches(monkeypatch):
    monkeypatch.setattr(chunked_prefill, "MOST_BYTES", 1)
    long, short = text_sample("long", torch.full((64,), 5)), text_sample("short", torch.full((WINDOW,), 5))
    plain, windowed, hybrid = (cache_target(name) for name in ("llama", "mistral", "qwen3_next"))
    assert chunk_length(plain, plain.inputs([long])) is None
    assert chunk_length(windowed, windowed.inputs([short])) is None
    assert chunk_length(hybrid, hybrid.inputs([long, short])) is None
