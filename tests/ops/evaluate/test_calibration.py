"""The calibration of a draft's confidence head: what it says in decoding against what is accepted."""

import pytest
import torch
from batch_cases import BLOCK, draft_for_family, family_case

from ops.evaluate.statistics import BINS, calibration
from ops.lib.drafts.decoding.decode import Decoded, DraftContext
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.dspark.config import Dspark

NEW = 12


def answer(accepted, confidence):
    return Decoded(tuple(range(1 + sum(accepted) + len(accepted))), accepted, confidence=confidence)


def test_the_errors_are_those_counted_by_hand():
    answers = [answer((2, 0), ((0.9, 0.7, 0.3), (0.95,))), answer((3,), ((1.0, 0.35, 0.72),))]
    found = calibration(answers)
    said = [0.9, 0.7, 0.3, 0.95, 1.0, 0.35, 0.72]
    accepted = [1, 1, 0, 0, 1, 1, 1]
    assert (7, 7) == (found["slots"], sum(part["slots"] for part in found["reliability"]))
    assert found["brier"] == pytest.approx(sum((p - a) ** 2 for p, a in zip(said, accepted, strict=True)) / 7)
    bins = {9: ([0.9, 0.95, 1.0], 2 / 3), 7: ([0.7, 0.72], 1.0), 3: ([0.3, 0.35], 0.5)}
    error = sum(len(of) * abs(sum(of) / len(of) - share) for of, share in bins.values()) / 7
    assert found["ece"] == pytest.approx(error)
    assert [0.3, 0.7, 0.9] == [part["low"] for part in found["reliability"]]
    assert found["bins"] == BINS == 10


def test_a_draft_without_such_a_head_or_without_a_step_has_no_calibration():
    assert calibration([answer((2, 0), ()), answer((), ())]) is None
    assert calibration([]) is None


def test_a_head_that_says_what_happens_has_no_error():
    certain = [answer((1,), ((1.0, 0.0),)), answer((0,), ((0.0,),))]
    found = calibration(certain)
    assert (0.0, 0.0) == (found["ece"], found["brier"])


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return family_case("qwen3", tmp_path_factory.mktemp("case"))


def with_heads(**changes):
    """A draft whose bias and confidence differ from token to token."""
    draft = draft_for_family(algorithm=Dspark(rank=6, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "markov" in name or "confidence" in name:
                weight.add_(torch.randn(weight.shape, generator=generator))
    return draft


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 20.0])
def test_decoding_keeps_what_the_head_says_of_every_slot_that_a_step_reached(case, temperature, sample_from_anchor):
    target, samples = case
    draft = with_heads(sample_from_anchor=sample_from_anchor)
    decoded = decode_speculative_batch(target, draft, samples, DecodeSettings(NEW, temperature))
    lengths = [[len(said) for said in one.confidence] for one in decoded]
    assert lengths == [[min(count + 1, BLOCK - 1) for count in one.accepted] for one in decoded]
    if temperature:  # so high that what a random draft draws is often accepted
        assert {1, 2} <= {count for one in decoded for count in one.accepted}
    for sample, one in zip(samples, decoded, strict=True):
        for said, expected in zip(one.confidence, slow_confidences(target, draft, sample, one), strict=True):
            assert list(said)[: len(expected)] == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def slow_confidences(target, draft, sample, decoded):
    """The confidences of each step, from one pass of the target over the whole answer.

    A slot depends on accepted tokens only.
    """
    prompt = sample.input_ids[: sample.prompt_tokens].tolist()
    tokens = torch.tensor([[*prompt, *decoded.tokens]])
    with target.capture_inputs(draft.config.target_layer_ids) as captured:
        target.model(input_ids=tokens)
        features_SF = captured.features()[0]
    w1, head = draft.markov_head.markov_w1.weight, draft.confidence_head.proj
    found, anchor = [], len(prompt)
    for count in decoded.accepted:
        context = DraftContext(draft)
        context.append(features_SF[:anchor])
        embeds = target.embed_weight[[int(tokens[0, anchor]), draft.config.mask_token_id]]
        hidden_DM = draft.propose(*embeds, context.kv)
        before = tokens[0, anchor : anchor + min(count + 1, len(hidden_DM))]
        joined = torch.cat((hidden_DM[: len(before)], w1[before]), dim=1)
        found.append((joined @ head.weight[0] + head.bias).sigmoid().tolist())
        anchor += count + 1
    return found


def test_without_the_head_decoding_keeps_nothing(case):
    target, samples = case
    decoded = decode_speculative_batch(target, with_heads(confidence_head=False), samples, DecodeSettings(NEW))
    assert all(one.confidence == () and one.accepted for one in decoded)
