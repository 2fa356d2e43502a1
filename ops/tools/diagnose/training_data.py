"""Findings from the training's samples: whether the answers are the target's own, what was lost, and the loss mask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import sqrt

import torch
from attrs import define, frozen
from torch import Tensor

from dsl.finding import Finding
from ops.artifacts import TargetModel, TokenShards
from ops.capture_targets.backend import forward_batch
from ops.lib.data.batching import spread
from ops.lib.data.sample_account import MOST_LOST, Loss
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.losses.slots import slot_weights
from ops.lib.target.model import Target, target_info, text_config
from ops.tools.diagnose.judgement import (
    CUT_BLOCKS,
    LOSS_MASK,
    MASK_IN_TEXTS,
    OWN_ANSWERS,
    SAMPLES_KEPT,
    judged,
    unmeasured,
)

SPLIT = "train"
LEAST_OWN = 0.8
ERRORS = 2.0  # standard errors
ROWS = 1024  # of logits at once


@frozen
class OwnShare:
    """The share of the answers' tokens that are the target's own choice.

    tokens: answer tokens checked. chosen: those that are the target's most likely token, given all before them.
    expected: how many would be, had the target itself sampled at the answers' temperature.
    """

    tokens: int
    chosen: int
    expected: float

    @property
    def share(self) -> float:
        return self.chosen / self.tokens if self.tokens else 1.0

    @property
    def expected_share(self) -> float:
        return self.expected / self.tokens if self.tokens else 1.0

    @property
    def error(self) -> float:
        """The standard error of `expected`; 0 without sampled tokens."""
        return sqrt(self.expected * max(1 - self.expected_share, 0.0))


def own_finding(
    target: Target, samples: Sequence[TokenSample], regenerated_at: float | None, kept_by: str | None = None
) -> Finding:
    """A finding on whether the training answers are the target's own. samples: training samples.

    regenerated_at, kept_by: as in Chain.
    """
    own = count_own(target, samples, regenerated_at or 0.0)
    normal, advice = _expectation(own, regenerated_at, kept_by)
    return judged(
        name=OWN_ANSWERS,
        measured=f"{own.share:.0%} of {own.tokens:,} tokens of the training answers are the target's greedy choice",
        normal=normal,
        advice=advice,
        is_cause=own.chosen < LEAST_OWN * own.expected - ERRORS * own.error,
    )


def kept_findings(losses: Sequence[tuple[str, Loss]] | None) -> list[Finding]:
    """A finding for each loss of a node. losses: as in Chain.

    Answers with other tokens than the target generated lower tau. Missing samples may lower it if they are of one kind.
    """
    if losses is None:
        return [unmeasured(SAMPLES_KEPT, "the store no longer has the accounts of the samples")]
    normal = f"no node loses more than {MOST_LOST:.0%} of its samples or answers"
    if not losses:
        return [
            judged(name=SAMPLES_KEPT, measured=f"every node kept at least {1 - MOST_LOST:.0%} of them", normal=normal)
        ]
    return [
        judged(
            name=SAMPLES_KEPT,
            measured=f"{node}: {loss.text}",
            normal=normal,
            advice=loss.remedy_on_a_line,
            is_cause=loss.of == "answers",
            is_note=loss.of == "samples",
        )
        for node, loss in losses
    ]


def _expectation(own: OwnShare, regenerated_at: float | None, kept_by: str | None) -> tuple[str, str]:
    """The normal range of the target's own share, and advice for values outside of it."""
    if regenerated_at is None:
        advice = "put regenerate_answers between the target and capture, and train on the target's own answers"
        if kept_by is not None:
            advice = (
                f'{kept_by} left the answers of the data set unchanged (answers = "data"): set answers = "target" of '
                "it, and train on the target's own answers"
            )
        return (
            f"at least {LEAST_OWN:.0%}; all but ties after regenerate_answers at temperature 0. Decoding "
            "accepts what the target chooses, not what the data set says",
            advice,
        )
    return (
        f"at least {LEAST_OWN:.0%} of the {own.expected_share:.0%} expected of this target's own answers at "
        f"temperature {regenerated_at:g}, at which they were regenerated",
        "the answers were regenerated, but they differ from this target's answers here: regenerate them with the "
        "served target, then capture and train again",
    )


@torch.inference_mode()
def count_own(target: Target, samples: Sequence[TokenSample], temperature: float = 0.0) -> OwnShare:
    tokens, chosen, expected = 0, 0, 0.0
    for sample in samples:
        _, final_BSM = forward_batch(target, [sample], (0,), final_hidden=True)
        assert final_BSM is not None
        places = sample.loss_mask[1:].nonzero().squeeze(1)
        for rows in places.split(ROWS):
            logits_RV = target.head.logits(final_BSM[0, rows].to(target.device)).float()
            chosen += int((logits_RV.argmax(-1).cpu() == sample.input_ids[rows + 1]).sum())
            expected += _greedy_draws(logits_RV, temperature)
        tokens += len(places)
    return OwnShare(tokens, chosen, expected)


def _greedy_draws(logits_RV: Tensor, temperature: float) -> float:
    """The expected number of rows in which sampling at this temperature gives the most likely token."""
    if temperature == 0:
        return float(len(logits_RV))
    return float((logits_RV / temperature).softmax(-1).amax(-1).sum())


LOOKED_AT = 2000  # samples, spread over the split
LEAST_SHARE, LARGEST_SHARE = 0.02, 0.95
MOST_WITHOUT = 0.05
MOST_CUT = 0.25
OF_MASK = (LOSS_MASK, CUT_BLOCKS, MASK_IN_TEXTS)


@define
class MaskCounts:
    """Counts over samples: samples, tokens, image tokens, tokens in the loss mask, and samples without an anchor.

    slots, kept: over all possible blocks, their slots and those that the mask keeps. mask_tokens: occurrences of the
    mask token in texts.
    """

    samples: int = 0
    tokens: int = 0
    image_tokens: int = 0
    loss_tokens: int = 0
    without: int = 0
    slots: int = 0
    kept: int = 0
    mask_tokens: int = 0


def mask_findings(
    learnt: TokenShards | None, target: TargetModel, mask_token_id: int, block_size: int
) -> list[Finding]:
    if learnt is None:
        return [unmeasured(name, "the store no longer has the training tokens") for name in OF_MASK]
    reader = TokenReader(learnt, SPLIT)
    if not len(reader):
        return [unmeasured(name, f"the tokens have no sample of the split {SPLIT}") for name in OF_MASK]
    seen = look(reader, mask_token_id, block_size)
    pads = {reader.info["pad_token_id"], text_config(target).get("pad_token_id")}
    ends = {*target_info(target)["eos_token_ids"], *reader.info["eos_token_ids"]}
    return [_share(seen), _cut(seen, block_size), _token(seen, mask_token_id, pads, ends)]


def look(reader: TokenReader, mask_token_id: int, block_size: int) -> MaskCounts:
    """Count tokens and anchors over the samples; every anchor that the training may draw counts once."""
    counts, image_token_id = MaskCounts(), reader.info["image_token_id"]
    for place in spread(range(len(reader)), LOOKED_AT):
        input_ids_S, loss_mask_S = reader.labels(place)
        anchors_A = (loss_mask_S[:-1] & loss_mask_S[1:]).nonzero().squeeze(1)
        counts.kept += int((slot_weights(loss_mask_S, anchors_A, torch.ones(block_size))[:, 1:] > 0).sum())
        counts.slots += len(anchors_A) * (block_size - 1)
        counts.without += not len(anchors_A)
        counts.tokens += len(input_ids_S)
        counts.image_tokens += 0 if image_token_id is None else int((input_ids_S == image_token_id).sum())
        counts.loss_tokens += int(loss_mask_S.sum())
        counts.mask_tokens += int((input_ids_S == mask_token_id).sum())
        counts.samples += 1
    return counts


def anchors_by_category(reader: TokenReader, num_anchors: int | None) -> dict[str, int]:
    """The number of anchors drawn in one pass over the samples, by category. num_anchors: None for all possible ones.

    Only some samples, spread over the split, are counted if there are many, since only the shares matter.
    """
    anchors: dict[str, int] = {}
    for place in spread(range(len(reader)), LOOKED_AT):
        loss_mask_S = reader.labels(place)[1]
        possible = int((loss_mask_S[:-1] & loss_mask_S[1:]).sum())
        drawn = possible if num_anchors is None else min(possible, num_anchors)
        category = reader.records[place]["category"]
        anchors[category] = anchors.get(category, 0) + drawn
    return anchors


def _share(seen: MaskCounts) -> Finding:
    texts = seen.tokens - seen.image_tokens  # the size of an image does not depend on the mask
    share, without = seen.loss_tokens / max(texts, 1), seen.without / seen.samples
    is_cause = not LEAST_SHARE <= share <= LARGEST_SHARE or without > MOST_WITHOUT
    return judged(
        name=LOSS_MASK,
        measured=f"{share:.{1 if share < 0.1 else 0}%} of {texts:,} text tokens of the training, without the "
        f"{seen.image_tokens:,} image tokens; {seen.without} of {seen.samples} samples "
        "have no anchor",
        normal=f"{LEAST_SHARE:.0%} to {LARGEST_SHARE:.0%}: the answers, not nothing, and not the prompts; at "
        f"most {MOST_WITHOUT:.0%} of the samples without an anchor, which teach nothing",
        advice="look at preview.html of the tokens: its colours show the loss mask; compare the template's markers "
        "with the answers",
        is_cause=is_cause,
    )


def _cut(seen: MaskCounts, block_size: int) -> Finding:
    share = 1 - seen.kept / seen.slots if seen.slots else 1.0
    return judged(
        name=CUT_BLOCKS,
        measured=f"{share:.0%} of the slots of all possible blocks of {block_size} are cut off by the loss mask",
        normal=f"at most {MOST_CUT:.0%}, the share at the ends of answers of 2 * block_size tokens; drop "
        "shorter answers",
        advice="train on longer answers (min_loss_tokens of tokenize) or with a smaller block_size; where answers are "
        "long, the loss mask has holes: see preview.html of the tokens",
        is_cause=share > MOST_CUT,
    )


def _token(seen: MaskCounts, mask: int, pads: Collection[int | None], ends: Collection[int]) -> Finding:
    roles = [name for name, ids in (("the pad id", pads), ("an EOS id", ends)) if mask in ids]
    return judged(
        name=MASK_IN_TEXTS,
        measured=f"{mask} occurs {seen.mask_tokens} times in {seen.tokens:,} tokens"
        + (f" and is {roles[0]}" if roles else ""),
        normal="never, and neither the pad nor an EOS id: it would mean both a word and an empty slot",
        advice="set mask_token_id of train_dflash to an id that no text produces, and train again",
        is_cause=bool(roles or seen.mask_tokens),
    )
