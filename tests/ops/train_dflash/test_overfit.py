"""A draft overfitted on the target's own answers proposes them whole: features, training and decoding fit together.

The target is a Qwen3-VL with large random weights. Its greedy answers hardly repeat a token and have no rule, so that a
draft can only know them by heart, from the features; a feature, position or token that decoding hands over otherwise
than training did is as good as noise to it. Half of the prompts hold an image.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from attrs import evolve
from lively_target import make_lively
from overfit import overfit, with_answers
from torch import Tensor

from ops.artifacts import TargetModel
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import Decoded, DraftContext, decode_plain, decode_speculative
from ops.lib.target.model import Target

BLOCK = 8
NEW_TOKENS = 47  # behind the first token of an answer
PER_CATEGORY = 16
EOS = [2, *range(596, 600)]  # enough of them that some answers end by themselves


@pytest.fixture(scope="module")
def target(target, tmp_path_factory) -> TargetModel:
    return make_lively(target, tmp_path_factory.mktemp("lively") / "target", eos_token_ids=EOS)


@pytest.fixture(scope="module")
def loaded(target) -> Target:
    return Target.load(target)


@pytest.fixture(scope="module")
def prompts(tokens) -> list[TokenSample]:
    """The first 16 prompts with an image and the first 16 without."""
    reader = TokenReader(tokens, "train")
    samples = [reader.sample(index) for index in range(len(reader))]
    return [
        sample
        for category in ("image", "text")
        for sample in [one for one in samples if one.category == category][:PER_CATEGORY]
    ]


@pytest.fixture(scope="module")
def answers(loaded, prompts) -> list[Decoded]:
    return [decode_plain(loaded, sample, NEW_TOKENS) for sample in prompts]


@pytest.fixture(scope="module")
def draft(tokens, target, prompts, answers, tmp_path_factory) -> DraftModel:
    """Through the ops, as a pipeline has them: capture, shard, train, export."""
    folder = tmp_path_factory.mktemp("overfit")
    own = with_answers(folder / "tokens", TokenReader(tokens).info, prompts, answers)
    exported = overfit(folder, target, own, capture={}, block_size=BLOCK, num_anchors=NEW_TOKENS + 1)
    return load_draft(exported.path)


@pytest.fixture(scope="module")
def speculative(loaded, draft, prompts) -> list[Decoded]:
    return [decode_speculative(loaded, draft, sample, NEW_TOKENS) for sample in prompts]


def steps_before_the_end(answer: Decoded) -> list[int]:
    """accepted + 1 of the verification steps that do not reach the end of the answer, which is EOS or the limit."""
    yielded = [accepted + 1 for accepted in answer.accepted]
    return [count for count, total in zip(yielded, accumulate(yielded), strict=True) if total < answer.generated]


def share_of_block(answers: list[Decoded]) -> float:
    steps = [count for answer in answers for count in steps_before_the_end(answer)]
    return sum(steps) / len(steps) / BLOCK


def test_the_answers_are_such_that_a_draft_must_know_them_by_heart(answers):
    assert 2 * PER_CATEGORY == len({answer.tokens for answer in answers})
    tokens = sum(len(answer.tokens) for answer in answers)
    assert tokens > 2 * PER_CATEGORY * 30
    assert sum(len(set(answer.tokens)) for answer in answers) > 0.7 * tokens
    assert 0 < sum(answer.tokens[-1] in EOS for answer in answers) < len(answers)


def test_an_overfitted_draft_proposes_whole_blocks(prompts, speculative):
    for category in ("image", "text"):
        answers = [answer for sample, answer in zip(prompts, speculative, strict=True) if sample.category == category]
        share = share_of_block(answers)
        print(f"{category}: {share:.4f} of the block")
        assert share >= 0.97


def test_it_loses_nothing(answers, speculative):
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in speculative]


def layers_one_higher(monkeypatch, draft):
    layers = [layer + 1 for layer in draft.config.target_layer_ids]
    monkeypatch.setattr(draft, "config", evolve(draft.config, target_layer_ids=layers))


def features_one_token_late(monkeypatch, draft):
    append = DraftContext.append
    behind: list[Tensor] = []

    def late(context, features_SF):
        before = behind.pop() if context.length else torch.zeros_like(features_SF[:1])
        behind[:] = [features_SF[-1:]]
        append(context, torch.cat((before, features_SF[:-1])))

    monkeypatch.setattr(DraftContext, "append", late)


def blocks_one_position_late(monkeypatch, draft):
    forward_blocks = DraftModel.forward_blocks

    def late(model, anchors_NM, mask_M, positions_N, *others, **named):
        return forward_blocks(model, anchors_NM, mask_M, positions_N + 1, *others, **named)

    monkeypatch.setattr(DraftModel, "forward_blocks", late)


def the_newest_feature_missing(monkeypatch, draft):
    append = DraftContext.append

    def without(context, features_SF):
        append(context, torch.cat((features_SF[:-1], torch.zeros_like(features_SF[-1:]))))

    monkeypatch.setattr(DraftContext, "append", without)


@pytest.mark.parametrize(
    "mismatch", [layers_one_higher, features_one_token_late, blocks_one_position_late, the_newest_feature_missing]
)
def test_a_mismatch_of_training_and_decoding_would_show(mismatch, monkeypatch, loaded, draft, prompts, answers):
    mismatch(monkeypatch, draft)
    some = range(0, len(prompts), 2 * PER_CATEGORY // 4)
    decoded = [decode_speculative(loaded, draft, prompts[index], NEW_TOKENS) for index in some]
    assert [answers[index].tokens for index in some] == [answer.tokens for answer in decoded]
    share = share_of_block(decoded)
    print(f"{mismatch.__name__}: {share:.4f} of the block")
    assert share < 0.95
