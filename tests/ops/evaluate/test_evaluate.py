"""Speculative decoding against slow references, tau's contract, and the losslessness check."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from evaluate_cases import BLOCK, make_draft, small_draft
from lively_target import make_lively
from reference_draft import reference_block
from safetensors.torch import save_file

from dsl.errors import DataError
from ops.artifacts import Draft, TargetModel
from ops.evaluate.lengths import spread_prompts
from ops.evaluate.prompts import Prompt
from ops.evaluate.statistics import acceptance_by_slot, acceptance_length
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import load_draft, random_draft
from ops.lib.drafts.decoding import decode
from ops.lib.drafts.decoding.decode import Decoded, decode_plain, decode_speculative, matching_prefix, until_eos
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.target.model import Target


@pytest.fixture(scope="module")
def target(target, tmp_path_factory) -> TargetModel:
    """A target with large random weights, whose every greedy token depends on all tokens before it."""
    return make_lively(target, tmp_path_factory.mktemp("lively") / "target")


@pytest.fixture(scope="module")
def loaded(target) -> Target:
    return Target.load(target)


@pytest.fixture(scope="module")
def draft_config(loaded):
    return small_draft(loaded)


@pytest.fixture(scope="module")
def draft(draft_config, tmp_path_factory) -> Draft:
    return make_draft(draft_config, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def prompts(tokens):
    """Two prompts with an image and two without."""
    reader = TokenReader(tokens, "test")
    return [prompt.sample() for prompt in spread_prompts(Prompt.held_out(reader), 2)]


def logits_without_cache(target: Target, sample, answer: list[int]):
    """Logits and features of prompt and answer in one forward pass from position 0."""
    ids = torch.cat([sample.input_ids[: sample.prompt_tokens], torch.tensor(answer, dtype=torch.int64)])
    whole = attrs.evolve(sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with torch.no_grad(), target.capture_inputs((1, 3, 5)) as captured:
        logits = target.forward(target.inputs([whole])).logits[0]
    return logits, captured.features()[0]


def slow_speculative(target: Target, draft, sample, max_new_tokens: int):
    """Speculative decoding by its definition: everything is computed anew in every step, and nothing is cached."""
    logits, _ = logits_without_cache(target, sample, [])
    tokens, accepted = [int(logits[-1].argmax())], []
    while tokens[-1] not in target.eos_token_ids and len(tokens) <= max_new_tokens:
        _, features = logits_without_cache(target, sample, tokens)
        anchor = sample.prompt_tokens + len(tokens) - 1
        with torch.no_grad():
            context = draft.context_kv(features[:anchor], torch.arange(anchor))
            embeds = target.embed_weight[[tokens[-1], draft.config.mask_token_id]]
            hidden = draft.propose(*embeds, context)
        proposal = (hidden @ target.head_weight.T).argmax(-1).tolist()
        count = 0
        while count < len(proposal):
            own, _ = logits_without_cache(target, sample, tokens + proposal[:count])
            if int(own[-1].argmax()) != proposal[count]:
                break
            count += 1
        own, _ = logits_without_cache(target, sample, tokens + proposal[:count])
        tokens += [*proposal[:count], int(own[-1].argmax())]
        accepted.append(count)
        for place, token in enumerate(tokens):
            if token in target.eos_token_ids:
                tokens = tokens[: place + 1]
                break
    return tokens[: max_new_tokens + 1], accepted


def test_plain_decoding_equals_the_argmax_of_a_pass_without_cache(loaded, prompts):
    for sample in prompts:
        answer = decode_plain(loaded, sample, 12)
        tokens = []
        while len(tokens) < len(answer.tokens):
            logits, _ = logits_without_cache(loaded, sample, tokens)
            best = logits[-1].topk(2).values
            assert float(best[0] - best[1]) == pytest.approx(answer.margins[len(tokens)], abs=1e-4)
            tokens.append(int(logits[-1].argmax()))
        assert tokens == list(answer.tokens)


@pytest.mark.parametrize("seed", [0, 1])
def test_speculative_decoding_equals_its_definition(loaded, prompts, draft_config, seed):
    draft = random_draft(draft_config, seed)
    for sample in prompts:
        tokens, accepted = slow_speculative(loaded, draft, sample, 15)
        answer = decode_speculative(loaded, draft, sample, 15)
        assert tokens == list(answer.tokens)
        assert accepted == list(answer.accepted)
        assert answer.tokens == decode_plain(loaded, sample, 15).tokens


def test_the_tokens_near_the_best_one_are_those_of_a_pass_without_cache(loaded, prompts, draft_config):
    settings, draft = DecodeSettings(12, within=2.0), random_draft(draft_config, 0)
    plain = decode_plain_batch(loaded, prompts, settings)
    speculative = decode_speculative_batch(loaded, draft, prompts, settings)
    found = 0
    for sample, *both in zip(prompts, plain, speculative, strict=True):
        logits, _ = logits_without_cache(loaded, sample, list(both[0].tokens[:-1]))
        behind = (logits.max(-1, keepdim=True).values - logits)[sample.prompt_tokens - 1 :]
        for answer in both:
            assert len(answer.tokens) == len(behind)
            for place, row in enumerate(behind):
                expected = {token: row[token].item() for token in (row < 2.0).nonzero()[:, 0].tolist()}
                near = answer.near.get(place, {answer.tokens[place]: 0.0})
                assert expected == pytest.approx(near, abs=1e-4)
                found += len(near) > 1
    assert found > 10
    assert all({} == answer.near for answer in decode_plain_batch(loaded, prompts, attrs.evolve(settings, within=0.0)))


def test_a_draft_that_knows_the_answer_has_whole_blocks_accepted(loaded, prompts, draft_config, monkeypatch):
    sample = prompts[0]
    answer = list(decode_plain(loaded, sample, 25).tokens)
    draft = random_draft(draft_config, 0)

    def knows(_target, _draft, context, _anchor, _use):
        done = context.length - sample.prompt_tokens + 1
        return (answer[done:] + [0] * BLOCK)[: BLOCK - 1]

    monkeypatch.setattr(decode, "propose", knows)
    decoded = decode_speculative(loaded, draft, sample, 24)
    assert tuple(answer[:25]) == decoded.tokens
    assert decoded.accepted == (BLOCK - 1,) * 4
    assert acceptance_length([decoded], 10, 0).tau == 6.0


def test_the_drafts_context_after_any_number_of_accepted_tokens_is_that_of_a_pass_without_cache(
    loaded, prompts, draft_config, monkeypatch
):
    draft = random_draft(draft_config, 0)
    wrong_at = (2, 0, BLOCK, 1, 4, 3)
    endless = attrs.evolve(loaded, info={**loaded.info, "eos_token_ids": []})
    for sample in prompts[1:3]:
        answer = list(decode_plain(endless, sample, 40).tokens)
        seen = []

        def almost_right(target, _draft, context, anchor, _use, sample=sample, answer=answer, seen=seen):
            done = context.length - sample.prompt_tokens
            assert anchor == answer[done]
            _, features = logits_without_cache(target, sample, answer[:done])
            slow = draft.context_kv(features, torch.arange(context.length))
            for layer, expected in zip(context.kv, slow, strict=True):
                torch.testing.assert_close(layer, expected, atol=2e-3, rtol=1e-3)
            proposal = answer[done + 1 : done + BLOCK]
            if wrong_at[len(seen)] < BLOCK - 1:
                proposal[wrong_at[len(seen)]] += 1
            seen.append(done)
            return proposal

        with monkeypatch.context() as patch:
            patch.setattr(decode, "propose", almost_right)
            decoded = decode_speculative(endless, draft, sample, 20)
        assert tuple(min(place, BLOCK - 1) for place in wrong_at) == decoded.accepted
        assert tuple(answer[:21]) == decoded.tokens


def test_what_is_accepted_behind_eos_in_the_middle_of_a_block_is_not_counted(
    loaded, prompts, draft_config, monkeypatch
):
    sample = prompts[0]
    answer = list(decode_plain(loaded, sample, 25).tokens)
    end = next(index for index in range(2, BLOCK) if answer[index] not in answer[:index])
    ending = attrs.evolve(loaded, info={**loaded.info, "eos_token_ids": [answer[end]]})

    def knows(_target, _draft, context, _anchor, _use):
        done = context.length - sample.prompt_tokens + 1
        return answer[done : done + BLOCK - 1]

    monkeypatch.setattr(decode, "propose", knows)
    decoded = decode_speculative(ending, random_draft(draft_config, 0), sample, 24)
    assert tuple(answer[: end + 1]) == decoded.tokens == decode_plain(ending, sample, 24).tokens
    assert (BLOCK - 1,) == decoded.accepted
    measured = acceptance_length([decoded], 10, 0)
    assert (end, BLOCK) == (measured.tau, measured.unclipped)


def test_greedy_generation_of_the_reference_draft_equals_ours(loaded, prompts, draft_config, monkeypatch):
    draft, config = random_draft(draft_config, 1), to_serving(draft_config)
    weights = draft.state_dict()
    sample = prompts[-1]
    ours = decode_speculative(loaded, draft, sample, 4)
    seen: list[int] = []

    def reference(target, _draft, context, anchor, _use):
        seen.append(anchor)
        answer = list(ours.tokens[: context.length - sample.prompt_tokens])
        assert anchor == ours.tokens[len(answer)]
        _, features = logits_without_cache(target, sample, [*answer, anchor])
        block = torch.tensor([anchor] + [draft.config.mask_token_id] * (BLOCK - 1))
        hidden = reference_block(config, weights, features, target.embed_weight[block], context.length)
        return (hidden[1:] @ target.head_weight.T).argmax(-1).tolist()

    monkeypatch.setattr(decode, "propose", reference)
    theirs = decode_speculative(loaded, draft, sample, 4)
    assert (ours.tokens, ours.accepted) == (theirs.tokens, theirs.accepted)
    assert len(seen) == ours.steps


def test_a_text_prompt_after_an_image_prompt_is_decoded_as_if_it_came_first(loaded, prompts, target):
    image = next(sample for sample in prompts if sample.category == "image")
    text = next(sample for sample in prompts if sample.category == "text")
    first = decode_plain(Target.load(target), text, 8)
    decode_plain(loaded, image, 8)
    again = decode_plain(loaded, text, 8)
    assert first.tokens == again.tokens
    assert first.margins == pytest.approx(again.margins, abs=1e-5)


def test_tokens_behind_eos_are_not_generated_tokens():
    answer = Decoded(tokens=(5, 6, 7, 2), accepted=(1, 4))
    assert answer.generated == 3
    assert answer.generated_unclipped == 7
    measured = acceptance_length([answer], 10, 0)
    assert (measured.tau, measured.unclipped) == (1.5, 3.5)
    assert 1 == measured.cut_steps
    assert 0 == acceptance_length([Decoded(tokens=(5, 6, 7, 2), accepted=(1, 0))], 10, 0).cut_steps


def test_an_answer_that_is_only_eos_takes_no_step():
    alone = Decoded(tokens=(2,))
    assert acceptance_length([alone], 10, 0).tau is None
    others = [Decoded(tokens=(5, 6, 2), accepted=(1,)), Decoded(tokens=(7, 6, 2), accepted=(1,))]
    with_others = acceptance_length([alone, *others], 100, 0)
    assert (with_others.tau, with_others.low, with_others.high) == (2.0, 2.0, 2.0)


def test_tau_is_tokens_over_steps_and_its_interval_resamples_prompts():
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(40):
        accepted = tuple(int(n) for n in rng.integers(0, 8, size=rng.integers(2, 9)))
        answers.append(Decoded(tokens=tuple(range(100, 101 + sum(accepted) + len(accepted))), accepted=accepted))
    measured = acceptance_length(answers, 2000, 0)
    tau = sum(a.generated for a in answers) / sum(a.steps for a in answers)
    slow = sorted(
        sum(a.generated for a in drawn) / sum(a.steps for a in drawn)
        for drawn in ([answers[i] for i in rng.integers(0, 40, size=40)] for _ in range(2000))
    )
    assert tau == pytest.approx(measured.tau)
    assert slow[50] == pytest.approx(measured.low, abs=0.15)
    assert slow[1949] == pytest.approx(measured.high, abs=0.15)
    assert measured == acceptance_length(answers, 2000, 0)


def test_a_prefix_matches_up_to_the_first_difference():
    assert matching_prefix([4, 5, 6], [4, 5, 9, 1]) == 2
    assert matching_prefix([4], [9, 4]) == 0
    assert matching_prefix([4, 5, 6], [4, 5, 6, 1]) == 3
    assert until_eos([1, 2, 3, 2], frozenset({2})) == [1, 2]


def test_a_slot_counts_as_accepted_when_the_prefix_reached_it():
    answers = [Decoded((1,) * 5, accepted=(0, 2)), Decoded((1,) * 5, accepted=(3, 1))]
    shares = acceptance_by_slot(answers, 4)
    assert shares == [0.75, 0.5, 0.25]
    assert acceptance_length(answers, 10, 0).unclipped == 1 + sum(shares)  # cumulative, as docs/evaluation.md says


def test_a_draft_with_a_missing_tensor_is_refused(draft, draft_config, tmp_path):
    weights = random_draft(draft_config, 0).state_dict()
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((draft.path / "config.json").read_text())
    with pytest.raises(DataError, match=r"fc\.weight"):
        load_draft(tmp_path)
