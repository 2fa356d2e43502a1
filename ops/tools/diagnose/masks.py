"""Findings from the training tokens only: the loss mask, the blocks that it cuts, the mask token."""

from __future__ import annotations

from collections.abc import Collection

import torch
from attrs import define

from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.batching import spread
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.losses.slots import slot_weights
from ops.lib.target.model import target_info, text_config
from ops.tools.diagnose.finding import Finding, unmeasured

SPLIT = "train"
LOOKED_AT = 2000  # samples, spread over the split
LEAST_SHARE, LARGEST_SHARE = 0.02, 0.95
MOST_WITHOUT = 0.05
MOST_CUT = 0.25
MASK_NAMES = ("loss mask", "cut blocks", "mask token in texts")


@define
class MaskCounts:
    """Counts over samples: tokens, image tokens, tokens of the loss mask, samples without an anchor,
    slots of all possible blocks, those that the mask keeps, and occurrences of the mask token in texts.
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
        return [unmeasured(name, "the store no longer has the training tokens") for name in MASK_NAMES]
    reader = TokenReader(learnt, SPLIT)
    if not len(reader):
        return [unmeasured(name, f"the tokens have no sample of the split {SPLIT}") for name in MASK_NAMES]
    seen = look(reader, mask_token_id, block_size)
    pads = {reader.info["pad_token_id"], text_config(target).get("pad_token_id")}
    ends = {*target_info(target)["eos_token_ids"], *reader.info["eos_token_ids"]}
    return [_share(seen), _cut(seen, block_size), _token(seen, mask_token_id, pads, ends)]


def look(reader: TokenReader, mask_token_id: int, block_size: int) -> MaskCounts:
    """Counts over the samples; every anchor that the training may draw counts once."""
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
    """The anchors of each category that one pass over the samples draws; all possible ones if num_anchors is None.

    Of many samples a part is counted, spread over the split: only the shares matter.
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
    return Finding(
        name=MASK_NAMES[0],
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
    return Finding(
        name=MASK_NAMES[1],
        measured=f"{share:.0%} of the slots of all possible blocks of {block_size} are cut off by the loss mask",
        normal=f"at most {MOST_CUT:.0%}, the share at the ends of answers of 2 * block_size tokens; drop "
        "shorter answers",
        advice="train on longer answers (min_loss_tokens of tokenize) or with a smaller block_size; where answers are "
        "long, the loss mask has holes: see preview.html of the tokens",
        is_cause=share > MOST_CUT,
    )


def _token(seen: MaskCounts, mask: int, pads: Collection[int | None], ends: Collection[int]) -> Finding:
    roles = [name for name, ids in (("the pad id", pads), ("an EOS id", ends)) if mask in ids]
    return Finding(
        name=MASK_NAMES[2],
        measured=f"{mask} occurs {seen.mask_tokens} times in {seen.tokens:,} tokens"
        + (f" and is {roles[0]}" if roles else ""),
        normal="never, and neither the pad nor an EOS id: it would mean both a word and an empty slot",
        advice="set mask_token_id of train_dflash to an id that no text produces, and train again",
        is_cause=bool(roles or seen.mask_tokens),
    )
