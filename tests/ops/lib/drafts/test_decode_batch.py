"""Batches against the slow references one by one, for every family and cache and wherever rows reject a block."""

from __future__ import annotations

import time

import attrs
import pytest
import torch
from batch_cases import BLOCK, draft_for_family, ending_at, family_case
from cache_cases import CACHES, OWN_CACHES, cache_case

from dsl.errors import ConfigError, DataError
from ops.lib.drafts.backbone.config import SLIDING_ATTENTION
from ops.lib.drafts.decoding import decode
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import (
    DecodeClock,
    DecodeSettings,
    decode_plain_batch,
    decode_speculative_batch,
)
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.drafts.decoding.draft_rows import DraftRows
from ops.lib.drafts.decoding.proposal import Proposal

NEW = 12
SLIDING = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}
CASES = {
    "qwen3": {},
    "qwen3 with a window": SLIDING,
    "qwen3_moe": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*fast path is not available")


@pytest.fixture(scope="module", params=[*CASES, *CACHES])
def case(request, tmp_path_factory):
    """A target that does not stop at EOS, prompts, and their plain answers from the slow reference."""
    if request.param in CACHES:
        target, samples = cache_case(request.param)
    else:
        target, samples = family_case(request.param.split()[0], tmp_path_factory.mktemp("case"), **CASES[request.param])
    return target, samples, [decode_plain(target, sample, NEW + BLOCK) for sample in samples]


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory):
    return family_case("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def draft():
    return draft_for_family()


def assert_same(expected, found):
    """Assert equal tokens and accepted counts, and margins that are equal except for rounding."""
    assert [(one.tokens, one.accepted) for one in expected] == [(one.tokens, one.accepted) for one in found]
    for one, other in zip(expected, found, strict=True):
        assert len(one.tokens) == len(other.margins)
        assert other.margins == pytest.approx(one.margins, abs=1e-3)


def test_plain_answers_of_a_batch_are_those_of_one_by_one_wherever_they_end(case):
    target, samples, answers = case
    assert min(len(set(answer.tokens)) for answer in answers) > 5  # answers that repeat themselves would hide mistakes
    ends = ending_at(target, [answers[0].tokens[4], answers[-1].tokens[7]])
    expected = [decode_plain(ends, sample, NEW) for sample in samples]
    assert len({len(one.tokens) for one in expected}) > 1
    assert_same(expected, decode_plain_batch(ends, samples, DecodeSettings(NEW)))
    assert_same(expected[:1], decode_plain_batch(ends, samples[:1], DecodeSettings(NEW)))


def almost_right(answers, samples, draft, features, wrong_at):
    """A replacement of `DraftRows.propose`: each row proposes its answer except for one slot, another in every step.

    A row is known by its context, which must be what `features` give in one pass.
    """
    slow = [draft.context_kv(rows.float(), torch.arange(len(rows))) for rows in features]

    def propose(self, target, anchors_B, choice, check):
        said = torch.zeros(len(anchors_B), BLOCK - 1, target.embed_weight.shape[0])
        starts, ends = self.rows.start_B.tolist(), self.rows.end_B.tolist()
        for row, (start, end, anchor) in enumerate(zip(starts, ends, anchors_B.tolist(), strict=True)):
            kv = [(k[row, :, start:end], v[row, :, start:end]) for k, v in self.kv]
            (place,) = (place for place, whole in enumerate(slow) if begins(whole, kv))
            done = end - start - samples[place].prompt_tokens
            assert answers[place].tokens[done] == anchor
            proposal = list(answers[place].tokens[done + 1 : done + BLOCK])
            wrong = wrong_at[place].pop(0)
            if wrong < BLOCK - 1:
                proposal[wrong] = (proposal[wrong] + 1) % said.shape[-1]
            said[row, torch.arange(BLOCK - 1), torch.tensor(proposal)] = 1.0
        return Proposal(said.argmax(-1))

    return propose


def begins(whole, kv):
    """Whether the keys and values of every layer are the first of `whole`, but for rounding."""
    length = kv[0][0].shape[1]
    return length <= whole[0][0].shape[1] and all(
        torch.allclose(part, all_of_it[:, :length], atol=2e-3, rtol=1e-3)
        for pair, whole_pair in zip(kv, whole, strict=True)
        for part, all_of_it in zip(pair, whole_pair, strict=True)
    )


def features_of(target, samples, answers, layer_ids):
    """The features of prompt and answer, from one pass without a cache."""
    found = []
    for sample, answer in zip(samples, answers, strict=True):
        ids = torch.cat([sample.input_ids[: sample.prompt_tokens], torch.tensor(answer.tokens)])
        whole = attrs.evolve(sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
        with torch.no_grad(), target.capture_inputs(layer_ids) as captured:
            target.forward(target.inputs([whole]), use_cache=False)
        found.append(captured.features()[0])
    return found


def test_rows_that_accept_different_numbers_of_tokens_give_the_plain_answers(case, draft, monkeypatch):
    target, samples, answers = case
    schedule = [[2, 0, BLOCK, 1, 3, 0, 0], [BLOCK, BLOCK, BLOCK, 0], [0] * 20, [1, BLOCK, 0, 2, 3, 0], [3] * 20]
    wanted = [list(row) for row in schedule[: len(samples)]]
    features = features_of(target, samples, answers, draft.config.target_layer_ids)
    monkeypatch.setattr(DraftRows, "propose", almost_right(answers, samples, draft, features, wanted))
    found = decode_speculative_batch(target, draft, samples, DecodeSettings(NEW))
    assert [answer.tokens[: NEW + 1] for answer in answers] == [one.tokens for one in found]
    for row, one in zip(schedule, found, strict=False):
        assert tuple(min(place, BLOCK - 1) for place in row[: one.steps]) == one.accepted
    assert len({one.steps for one in found}) > 1
    for answer, one in zip(answers, found, strict=True):
        assert one.margins == pytest.approx(answer.margins[: NEW + 1], abs=1e-3)


def recorded(monkeypatch, decode_all):
    """Run `decode_all`; also returns the draft's proposals by anchor and length of the context, in order."""
    proposals = []
    propose, propose_all = decode.propose, DraftRows.propose

    def one(target, draft, context, anchor, use):
        proposal = propose(target, draft, context, anchor, use)
        proposals.append((anchor, context.length, proposal))
        return proposal

    def batch(self, target, anchors_B, choice, check):
        proposal = propose_all(self, target, anchors_B, choice, check)
        rows = zip(anchors_B.tolist(), self.rows.length_B.tolist(), proposal.tokens_BD.tolist(), strict=True)
        proposals.extend(rows)
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(decode, "propose", one)
        patch.setattr(DraftRows, "propose", batch)
        return decode_all(), sorted(proposals)


def both_ways(monkeypatch, target, draft, samples, use=None):
    """The proposals of the batch, once they and the answers have been compared with the reference's."""
    expected = recorded(monkeypatch, lambda: [decode_speculative(target, draft, one, NEW, use) for one in samples])
    found = recorded(monkeypatch, lambda: decode_speculative_batch(target, draft, samples, DecodeSettings(NEW), use))
    assert_same(expected[0], found[0])
    assert expected[1] == found[1]
    return found[1]


@pytest.mark.parametrize("window", [None, 6])
def test_a_draft_proposes_in_a_batch_what_it_proposes_alone(qwen3_vl, monkeypatch, window):
    target, samples = qwen3_vl
    sliding = {} if window is None else {"layer_types": (SLIDING_ATTENTION,) * 2, "sliding_window": window}
    answer = decode_plain(target, samples[1], NEW)
    proposals = both_ways(monkeypatch, ending_at(target, [answer.tokens[5]]), draft_for_family(**sliding), samples)
    assert len({tuple(proposal) for _, _, proposal in proposals}) > len(proposals) // 2


def test_every_setting_of_how_a_draft_is_fed_takes_effect_in_the_batch_as_in_the_reference(
    qwen3_vl, draft, monkeypatch
):
    target, samples = qwen3_vl
    use = DraftUse.of(draft.config)
    changes = [{}, {"target_layer_ids": (1, 3, 5)}, {"mask_token_id": 8}, {"block_offset": 1}, {"block_size": 3}]
    proposals = [both_ways(monkeypatch, target, draft, samples[2:4], attrs.evolve(use, **one)) for one in changes]
    trained = {(anchor, length): proposal for anchor, length, proposal in proposals[0]}
    for changed in proposals[1:]:
        assert any(trained.get((anchor, length)) != proposal for anchor, length, proposal in changed)
    assert {2} == {len(proposal) for _, _, proposal in proposals[-1]}


def test_blocks_larger_than_in_training_or_without_a_draft_token_are_refused(draft):
    assert 2 == DraftUse.of(draft.config, 2).block_size
    assert BLOCK == DraftUse.of(draft.config).block_size
    for size in (1, BLOCK + 1):
        with pytest.raises(ConfigError, match=rf"block_size: must lie in 2\.\.{BLOCK}.*got {size}"):
            DraftUse.of(draft.config, size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_other_prompts_of_a_batch_change_nothing(qwen3_vl, draft, temperature):
    target, samples = qwen3_vl
    ends = ending_at(target, list(range(100, 120)))
    settings = DecodeSettings(NEW, temperature, seed=5)
    for decode_all in (
        lambda batch, settings=settings: decode_plain_batch(ends, batch, settings),
        lambda batch, settings=settings: decode_speculative_batch(ends, draft, batch, settings),
    ):
        together = decode_all(samples)
        assert_same([decode_all([sample])[0] for sample in samples], together)
        assert_same(together[::-1], decode_all(samples[::-1]))
        assert_same(together, [one for start in (0, 2, 4) for one in decode_all(samples[start : start + 2])])
        other_seed = decode_all(samples, attrs.evolve(settings, seed=6))
        assert (temperature == 0) == ([one.tokens for one in together] == [one.tokens for one in other_seed])
        assert [] == decode_all([])


@pytest.mark.parametrize("name", ["mistral", "gemma2 eager", "gemma4_text", "lfm2"])
def test_drawn_answers_do_not_depend_on_the_other_prompts_whatever_the_cache(name, draft):
    target, samples = cache_case(name)
    settings = DecodeSettings(NEW, temperature=1.0, seed=5)
    for decode_all in (
        lambda batch: decode_plain_batch(target, batch, settings),
        lambda batch: decode_speculative_batch(target, draft, batch, settings),
    ):
        assert_same([decode_all([sample])[0] for sample in samples], decode_all(samples))


@pytest.mark.parametrize("name", OWN_CACHES)
def test_a_target_with_a_cache_of_its_own_is_refused_before_anything_is_decoded(name, draft):
    target, samples = cache_case(name)
    for decode_all in (
        lambda: decode_plain_batch(target, samples, DecodeSettings(NEW)),
        lambda: decode_speculative_batch(target, draft, samples, DecodeSettings(NEW)),
        lambda: decode_speculative(target, draft, samples[0], NEW),
    ):
        with pytest.raises(DataError, match=f"a {name} target cannot verify a draft"):
            decode_all()


def test_only_the_device_of_the_target_is_waited_for(qwen3_vl, monkeypatch):
    target, samples = qwen3_vl
    waited_for = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited_for.append)
    decode_plain_batch(target, samples, DecodeSettings(1), DecodeClock(target.device))
    assert [] == waited_for
    DecodeClock(torch.device("cuda", 1)).start()
    assert [torch.device("cuda", 1)] == waited_for


def test_the_clock_tells_where_the_time_goes(qwen3_vl, draft):
    target, samples = qwen3_vl
    clock, start = DecodeClock(target.device), time.perf_counter()
    decode_speculative_batch(target, draft, samples, DecodeSettings(3), clock=clock)
    took = time.perf_counter() - start
    assert {"prefill", "draft", "verify", "other"} == set(clock.seconds)
    assert min(clock.seconds.values()) > 0
    assert sum(clock.seconds.values()) <= took
    plain = DecodeClock(target.device)
    decode_plain_batch(target, samples, DecodeSettings(3), plain)
    assert plain.seconds["draft"] == 0
    assert min(plain.seconds[part] for part in ("prefill", "verify", "other")) > 0
