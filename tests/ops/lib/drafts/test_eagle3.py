"""An EAGLE-3 draft proposes what its formulas say, whatever was accepted before, alone and in batches."""

from __future__ import annotations

import pytest
import torch
from batch_cases import ending_at, family_case
from eagle3_cases import LAYER_IDS, Reference, V, eagle3_folder, fit, read_by_the_draft
from mtp_cases import BLOCK, NEW, USE, anchors_of, corrected

from ops.lib.drafts.decoding import chain
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.decoding.eagle3 import Eagle3Head
from ops.lib.target import chunked_prefill

SETTINGS = DecodeSettings(NEW)
SOME = [token for token in range(V) if token % 7 not in (1, 4)]
HEADS = {
    "some tokens": {"tokens": SOME},
    "its own embedding": {"tokens": SOME, "has_embedding": True},
    "the target's head and default layers": {"ids": None},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_vl"])
def case(request, tmp_path_factory):
    return family_case(request.param, tmp_path_factory.mktemp("case"))


@pytest.mark.parametrize("kind", HEADS)
def test_every_proposal_is_that_of_the_formulas_in_float64_after_any_number_of_accepted_tokens(
    case, kind, tmp_path, monkeypatch
):
    target, samples = case
    folder = eagle3_folder(tmp_path / "eagle3", **HEADS[kind])
    head, reference = Eagle3Head.load(target, folder), Reference.of(folder, target)
    layer_ids = LAYER_IDS if "ids" not in HEADS[kind] else (1, 3, 4)  # of eight layers
    image = target.family.config.get("image_token_id")
    for sample in (samples[1], samples[-1]):
        plain, answer, found = corrected(target, head, sample, monkeypatch)
        assert plain.tokens[: NEW + 1] == answer.tokens
        assert set(range(BLOCK)) == set(answer.accepted[:BLOCK])
        ids, inputs, features = read_by_the_draft(target, sample, plain.tokens, layer_ids)
        embeds = (
            torch.where((ids == image)[:, None], inputs.double(), reference.embed[ids])
            if image
            else reference.embed[ids]
        )
        for place, proposal in zip(anchors_of(answer), found, strict=True):
            end = len(sample.prompt().input_ids) + place  # of the tokens before the anchor
            tokens, logits = reference.chain(embeds[1 : end + 1], features[:end], BLOCK - 1)
            assert tokens == proposal
            assert len(logits[0]) == (V if "tokens" not in HEADS[kind] else len(SOME))
        assert len({tuple(proposal) for proposal in found}) > len(found) // 2


def test_the_layers_that_it_reads_are_outputs_by_their_numbers_in_config_json(tmp_path):
    target, samples = family_case("qwen3", tmp_path / "case")
    _, _, features = read_by_the_draft(target, samples[0], [], LAYER_IDS)
    output = target.forward(target.prompts(samples[:1]), output_hidden_states=True)
    assert torch.equal(torch.cat([output.hidden_states[k + 1][0] for k in LAYER_IDS], dim=-1), features)


@pytest.fixture(scope="module")
def fitted(case, tmp_path_factory):
    """A draft that knows some of the answers, which end after different numbers of tokens."""
    target, samples = case
    plain = decode_plain_batch(target, samples, SETTINGS)
    target = ending_at(target, [plain[0].tokens[5], plain[-1].tokens[8]])
    tokens = sorted({*SOME, *(token for answer in plain for token in answer.tokens)})
    head = Eagle3Head.load(target, eagle3_folder(tmp_path_factory.mktemp("fitted") / "eagle3", tokens))
    fit(head, target, samples, plain, steps=60)
    return target, samples, head


def test_batches_give_the_answers_and_accepted_lengths_of_one_by_one(fitted, monkeypatch):
    target, samples, head = fitted
    plain = [decode_plain_batch(target, [sample], SETTINGS)[0] for sample in samples]
    alone = [decode_speculative_batch(target, head, [sample], SETTINGS, USE)[0] for sample in samples]
    together = decode_speculative_batch(target, head, samples, SETTINGS, USE)
    assert [one.tokens for one in plain] == [one.tokens for one in alone] == [one.tokens for one in together]
    assert [one.accepted for one in alone] == [one.accepted for one in together]
    assert 3 <= len({count for one in alone for count in one.accepted})
    assert len({len(one.tokens) for one in alone}) > 1
    for module in (chain, chunked_prefill):
        monkeypatch.setattr(module, "MOST_BYTES", 1)
        monkeypatch.setattr(module, "LEAST_CHUNK", 5)
    in_chunks = decode_speculative_batch(target, head, samples, SETTINGS, USE)
    assert [(one.tokens, one.accepted) for one in together] == [(one.tokens, one.accepted) for one in in_chunks]
