"""A target's own MTP head proposes what its formulas say, whatever was accepted before, and loses nothing."""

from __future__ import annotations

import pytest
import torch
from mtp_cases import (
    BLOCK,
    NEW,
    USE,
    Reference,
    anchors_of,
    corrected,
    mtp_checkpoint,
    mtp_target,
    prompts_of,
    whole_pass,
)
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from ops.lib.drafts.decoding import chain
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.drafts.decoding.mtp import MtpHead

SETTINGS = DecodeSettings(NEW)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def case(request, tmp_path_factory):
    checkpoint = mtp_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    return (checkpoint, *mtp_target(checkpoint), prompts_of(checkpoint))


def test_every_proposal_is_that_of_the_formulas_in_float64_after_any_number_of_accepted_tokens(case, monkeypatch):
    checkpoint, target, head, samples = case
    reference = Reference.of(checkpoint, target)
    for sample in samples:
        plain, answer, found = corrected(target, head, sample, monkeypatch)
        assert plain.tokens[: NEW + 1] == answer.tokens
        assert set(range(BLOCK)) == set(answer.accepted[:BLOCK])
        x, h, positions = whole_pass(target, sample, plain.tokens)
        for place, proposal in zip(anchors_of(answer), found, strict=True):
            end = len(sample.prompt().input_ids) + place  # of the tokens before the anchor
            assert reference.proposals(x[1 : end + 1], h[:end], positions[:, :end], BLOCK - 1) == proposal
        assert len({tuple(proposal) for proposal in found}) > len(found) // 2


def test_long_prompts_in_chunks_are_proposed_for_as_in_one_pass(case, monkeypatch):
    _, target, head, samples = case
    whole = decode_speculative_batch(target, head, samples, SETTINGS, USE)
    passes = []
    forward = MtpHead.forward

    def counted(self, embedded, *given):
        passes.append(embedded.shape[1])
        return forward(self, embedded, *given)

    monkeypatch.setattr(chain, "MOST_BYTES", 1)
    monkeypatch.setattr(chain, "LEAST_CHUNK", 5)
    monkeypatch.setattr(MtpHead, "forward", counted)
    found = decode_speculative_batch(target, head, samples, SETTINGS, USE)
    assert [(one.tokens, one.accepted) for one in whole] == [(one.tokens, one.accepted) for one in found]
    assert 5 == max(passes) and passes.count(5) >= 4


def test_a_head_that_maps_tokens_as_its_target_does_is_accepted_whole_greedily_and_sampled(tmp_path):
    checkpoint = mtp_checkpoint("qwen3_next", tmp_path, noise=0.0)
    target, head = mtp_target(checkpoint)
    samples = prompts_of(checkpoint)
    plain = decode_plain_batch(target, samples, SETTINGS)
    for temperature in (0.0, 0.7):
        answers = decode_speculative_batch(target, head, samples, DecodeSettings(NEW, temperature), USE)
        assert [(BLOCK - 1,) * 3] == [answer.accepted for answer in answers]
        if not temperature:
            assert [one.tokens for one in plain] == [one.tokens for one in answers]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    checkpoint = mtp_checkpoint("qwen3_5", tmp_path_factory.mktemp("plain"))
    return checkpoint, mtp_target(checkpoint)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("mtp.")}, "hold no MTP head"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != "mtp.norm.weight"}, "mtp.norm.weight missing"),
        (lambda tensors: tensors | {"mtp.layers.1.mlp.gate.weight": torch.zeros(2)}, "MTP heads of one layer"),
        (lambda tensors: tensors | {"mtp.embed_tokens.weight": torch.zeros(2)}, "mtp.embed_tokens.weight too"),
        (lambda tensors: tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)}, "is quantised"),
        (lambda tensors: tensors | {"mtp.fc.weight": torch.zeros(3, 3)}, "does not fit config.json"),
    ],
)
def test_a_head_that_cannot_be_decoded_with_is_refused_by_name(tmp_path, plain, change, words):
    checkpoint, target = plain
    save_file(change(load_file(checkpoint / "model.safetensors")), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=words):
        MtpHead.load(target, tmp_path)
