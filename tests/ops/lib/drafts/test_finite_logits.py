"""Logits that are no numbers are an error in every way to decode, and never a draft that is always right."""

from __future__ import annotations

import attrs
import pytest
import torch
from batch_cases import draft_for_family, family_case

from dsl.errors import DataError
from ops.lib.drafts.decoding import answers
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.decoding.draft_rows import DraftRows

GREEDY, SAMPLED = DecodeSettings(6), DecodeSettings(6, temperature=1.0)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return family_case("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def damaged_target(case):
    """A target of which one weight is no number."""
    target, _ = case
    weight = target.model.model.layers[2].mlp.down_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    yield target
    with torch.no_grad():
        weight.copy_(before)


def damaged_draft():
    draft = draft_for_family()
    with torch.no_grad():
        draft.fc.weight[0, 0] = float("inf")
    return draft


PLAIN = {
    "one": lambda target, samples: decode_plain(target, samples[0], 6),
    "greedy": lambda target, samples: decode_plain_batch(target, samples, GREEDY),
    "sampled": lambda target, samples: decode_plain_batch(target, samples, SAMPLED),
}
SPECULATIVE = {
    "one": lambda target, draft, samples: decode_speculative(target, draft, samples[0], 6),
    "greedy": lambda target, draft, samples: decode_speculative_batch(target, draft, samples, GREEDY),
    "sampled": lambda target, draft, samples: decode_speculative_batch(target, draft, samples, SAMPLED),
}
TARGET = r"sample text 0, token 0 of the answer: the target's logits are not finite numbers in float32"


@pytest.mark.parametrize("way", PLAIN)
def test_a_target_without_finite_logits_is_refused_in_plain_decoding(damaged_target, case, way):
    with pytest.raises(DataError, match=TARGET):
        PLAIN[way](damaged_target, case[1])


@pytest.mark.parametrize("way", SPECULATIVE)
def test_a_target_without_finite_logits_is_refused_in_speculative_decoding(damaged_target, case, way):
    with pytest.raises(DataError, match=TARGET):
        SPECULATIVE[way](damaged_target, draft_for_family(), case[1])


@pytest.mark.parametrize("way", SPECULATIVE)
def test_a_draft_without_finite_logits_is_refused(case, way):
    target, samples = case
    with pytest.raises(DataError, match="the draft's logits are not finite numbers in float32"):
        SPECULATIVE[way](target, damaged_draft(), samples)


def test_the_sample_and_the_token_are_named_where_logits_stop_being_finite(case, monkeypatch):
    target, samples = case
    hidden = DraftRows.hidden
    calls = []

    def damaged_later(self, target, anchors_B):
        states = hidden(self, target, anchors_B)
        calls.append(len(states))
        if len(calls) == 2:
            states[1, 2, 5] = float("nan")
        return states

    monkeypatch.setattr(DraftRows, "hidden", damaged_later)
    with pytest.raises(DataError, match=r"sample text 1, token \d+ of the answer: the draft's"):
        decode_speculative_batch(target, draft_for_family(), samples, GREEDY)


def test_each_step_looks_for_the_end_in_its_own_tokens_only(case, monkeypatch):
    target, samples = case
    draft = draft_for_family()
    looked_at = []
    until_eos = answers.until_eos

    def counted(tokens, eos_token_ids):
        looked_at.append(len(tokens))
        return until_eos(tokens, eos_token_ids)

    monkeypatch.setattr(answers, "until_eos", counted)
    long = attrs.evolve(GREEDY, max_new_tokens=30)
    decode_plain_batch(target, samples, long)
    assert {1} == set(looked_at)
    decode_speculative_batch(target, draft, samples, long)
    assert max(looked_at) <= draft.config.block_size
