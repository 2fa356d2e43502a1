"""Decoding of a batch of prompts, plain and speculative, greedy or sampled.

A batch gives the answers of `decode_plain` and `decode_speculative`, but for rounding: its forward passes have other
shapes, and where two logits are nearly alike the other token may be taken (`Decoded.margins` tells how near they are).
Rows accept different numbers of draft tokens, and leave the batch when their answer has ended.

    B batch, T tokens so far, D draft tokens of a block, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from attrs import field, frozen, validators
from torch import Tensor

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.answers import Answers
from ops.lib.drafts.decoding.chain import ChainHead, ChainRows
from ops.lib.drafts.decoding.clock import DecodeClock, lap, start
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_options import ChainUse, DraftUse
from ops.lib.drafts.decoding.draft_rows import DraftRows
from ops.lib.drafts.decoding.sampling import Choice, GreedyChoice, SampledChoice, choose, draws
from ops.lib.target.cache import Rows, own_cache, whole_cache
from ops.lib.target.cache_trial import verification_of
from ops.lib.target.model import Target
from ops.lib.target.prefill import Prefill, prefill
from ops.lib.target.verify import Captured, Verification, verifier_of
from ops.lib.vision.batch import ModelInputs


@frozen
class DecodeSettings:
    """The settings for decoding a batch.

    max_new_tokens: at most, after the first one. temperature: 0 is greedy. seed: of random draws above 0. within:
    tokens whose logits are closer to the best one than this are kept in `Decoded.near`.
    """

    max_new_tokens: int = field(validator=validators.ge(0))
    temperature: float = field(default=0.0, validator=validators.ge(0))
    seed: int = 0
    within: float = 0.0


def decode_plain_batch(
    target: Target, samples: Sequence[TokenSample], settings: DecodeSettings, clock: DecodeClock | None = None
) -> list[Decoded]:
    """The target's own answer to each prompt. clock: its times are added up in it."""
    most_tokens = settings.max_new_tokens + 1
    decoded = []
    for batch in _batches(target, samples):
        sample_ids = [sample.id for sample in batch]
        draws_BN = draws(settings.seed, sample_ids, "token", most_tokens).to(target.device)

        def next_tokens(logits_BV: Tensor, rows_B: Tensor, step: int, draws_BN: Tensor = draws_BN) -> Tensor:
            return choose(logits_BV, draws_BN[rows_B, step], settings.temperature)

        prompts = target.prompts(batch)
        decoded += decode_stepwise(target, prompts, sample_ids, most_tokens, next_tokens, clock, settings.within)
    return decoded


def decode_speculative_batch(
    target: Target,
    draft: DraftModel | ChainHead,
    samples: Sequence[TokenSample],
    settings: DecodeSettings,
    use: DraftUse | ChainUse | None = None,
    clock: DecodeClock | None = None,
) -> list[Decoded]:
    """The answer to each prompt by speculative decoding. clock: its times are added up in it.

    draft: or a head that proposes token by token. use: how the draft is fed; default: as in training.
    """
    use = use or (DraftUse.of(draft.config) if isinstance(draft, DraftModel) else ChainUse())
    batches = _batches(target, samples)
    return [decoded for batch in batches for decoded in _speculate(target, draft, batch, settings, use, clock)]


def _batches(target: Target, samples: Sequence[TokenSample]) -> list[Sequence[TokenSample]]:
    """The samples in one batch; or each in a batch of its own, for a target that verifies one prompt at a time.

    Plain answers are decoded one by one for such a target too, since the times of the two are compared.
    """
    if samples and verification_of(target) is Verification.BATCH:
        return [samples]
    return [[sample] for sample in samples]


@torch.inference_mode()
def _speculate(
    target: Target,
    draft: DraftModel | ChainHead,
    samples: Sequence[TokenSample],
    settings: DecodeSettings,
    use: DraftUse | ChainUse,
    clock: DecodeClock | None,
) -> list[Decoded]:
    """Decode one batch: prefill, then draft, verify and accept until every answer has ended."""
    names, most_tokens = [sample.id for sample in samples], settings.max_new_tokens + 1
    answers = Answers.of(names, most_tokens, target.eos_token_ids, settings.within)
    room = most_tokens + use.block_size
    choice = _choice(settings, samples, room, target.device)
    way = verification_of(target)
    with _captured(target, draft, use) as captured:
        start(clock)
        begun = prefill(target, target.prompts(samples), whole_cache(target))
        lap(clock, "prefill")
        rows = Rows.of(begun.mask_BS)
        context = _context(draft, use, rows, begun)
        context.fill(captured.features(), room)
        lap(clock, "draft")
        verifier = verifier_of(way, target, captured, begun, rows, room)
        nearest = answers.nearest(begun.logits_BV[:, None])
        left = answers.add_one(anchors_B := choice.first(begun.logits_BV), nearest)
        while answers.open:
            if left is not None:
                anchors_B = anchors_B[left]
                for part in (rows, context, verifier, choice):
                    part.select(left)
            done_B = answers.lengths(target.device)
            lap(clock, "other")
            choice.begin(done_B)
            proposal = context.propose(target, anchors_B, choice, answers.check_draft)
            lap(clock, "draft")
            block_BK = torch.cat([anchors_B[:, None], proposal.tokens_BD], dim=1)
            logits_BKV, features_BKF = verifier.verify(block_BK)
            lap(clock, "verify")
            context.append(features_BKF)
            lap(clock, "draft")
            nearest = answers.nearest(logits_BKV)
            count_B, anchors_B = choice.accept(proposal.tokens_BD, logits_BKV)
            lap(clock, "other")
            verifier.settle(block_BK, count_B + 1)
            lap(clock, "verify")
            rows.advance(count_B + 1)
            left = answers.add_block(proposal, count_B, anchors_B, nearest)
        lap(clock, "other")
    return answers.decoded()


def _captured(
    target: Target, draft: DraftModel | ChainHead, use: DraftUse | ChainUse
) -> AbstractContextManager[Captured]:
    if isinstance(draft, DraftModel):
        assert isinstance(use, DraftUse)
        return target.capture_inputs(use.target_layer_ids)
    return draft.capture(target)


def _context(
    draft: DraftModel | ChainHead, use: DraftUse | ChainUse, rows: Rows, begun: Prefill
) -> DraftRows | ChainRows:
    if isinstance(draft, DraftModel):
        assert isinstance(use, DraftUse)
        return DraftRows(draft, use, rows)
    assert isinstance(use, ChainUse)
    return ChainRows(draft, use, rows, begun.offset_B)


def _choice(settings: DecodeSettings, samples: Sequence[TokenSample], count: int, device: torch.device) -> Choice:
    if settings.temperature == 0:
        return GreedyChoice()
    sample_ids = [sample.id for sample in samples]
    return SampledChoice.of(settings.temperature, settings.seed, sample_ids, count, device)


ChooseRows = Callable[[Tensor, Tensor, int], Tensor]
AfterStep = Callable[[Mapping[int, list[int]], int], None]


@torch.inference_mode()
def decode_stepwise(
    target: Target,
    prompts: ModelInputs,
    names: Sequence[str],
    most_tokens: int,
    choose: ChooseRows,
    clock: DecodeClock | None = None,
    within: float = 0.0,
    after_step: AfterStep | None = None,
) -> list[Decoded]:
    """The answers to prompts, decoded token by token, with at most `most_tokens` tokens including EOS.

    choose(logits_BV, rows_B, step): the token of each row, int64 [B]; rows_B are the rows of `prompts` that are left.
    within: as in `Answers`. after_step(ended, tokens): gets the answers that ended with this step, by their row of
    `prompts`, and how many tokens the step gave; it may raise to stop.
    """
    start(clock)
    begun = prefill(target, prompts, own_cache(target))
    cache, logits_BV, mask_BT = begun.cache, begun.logits_BV, begun.mask_BS
    next_position_B = mask_BT.sum(-1) + begun.offset_B
    lap(clock, "prefill")
    answers = Answers.of(names, most_tokens, target.eos_token_ids, within)
    rows_B = torch.arange(len(names), device=logits_BV.device)
    for step in range(most_tokens):
        nearest = answers.nearest(logits_BV[:, None])
        were_open = answers.open
        left = answers.add_one(tokens_B := choose(logits_BV, rows_B, step), nearest)
        if after_step is not None:
            ended = set(were_open) - set(answers.open)
            after_step({row: answers.tokens(row) for row in sorted(ended)}, len(were_open))
        if not answers.open:
            break
        if left is not None:
            cache.reorder_cache(left)
            rows_B, tokens_B, mask_BT, next_position_B = (
                tensor[left] for tensor in (rows_B, tokens_B, mask_BT, next_position_B)
            )
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows_B), 1)], dim=1)
        lap(clock, "other")
        logits_BV = target.model(
            input_ids=tokens_B[:, None],
            attention_mask=mask_BT,
            position_ids=(next_position_B + step)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        lap(clock, "verify")
    lap(clock, "other")
    return answers.decoded()
