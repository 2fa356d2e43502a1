"""Needs of `tokenize_chat`: the disk for tokens and pixels; and the tokens to expect after it."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsl.estimate import Estimate, Growth, Outlook
from dsl.sizes import shown_bytes
from ops.lib.data.files import read_json
from ops.lib.estimates import (
    MILLION,
    SamplesForeseen,
    TargetForeseen,
    TokensCounted,
    TokensForeseen,
    amount,
    counted_tokens,
    kept_samples,
)
from ops.tokenize_chat.op import TokenizeChat

TOKEN_BYTES = 5  # input_ids int32 and loss_mask uint8


def smoke(config: TokenizeChat, samples: int) -> dict[str, Any]:
    """The expected tokens are those of all samples."""
    return {"expected_tokens": None}


def estimate(config: TokenizeChat, outlook: Outlook) -> Estimate:
    """Counted if the tokens exist, else from expected_tokens, else for a million tokens."""
    by_split, vocab_size = None, config.vocab_size if config.processor == "builtin" else None
    longest = config.max_length
    if outlook.artifact is not None:
        info = read_json(outlook.artifact / "tokens.json")
        vocab_size, by_split = info["vocab_size"], Counter[str]()
        for shard in info["shards"]:
            by_split[shard["split"]] += shard["tokens"]
        longest = max((_longest(outlook.artifact / shard["file"]) for shard in info["shards"]), default=longest)
    source: SamplesForeseen | None = outlook.inputs["samples"]
    counted = growth = None
    if outlook.trial is not None and source is not None:
        samples = kept_samples(outlook.trial.artifact, source.samples)
        counted = TokensCounted(samples=samples, tokens=counted_tokens(outlook.trial.artifact, samples))
        growth = Growth(series=(source.samples.amount("samples"),), output=counted.tokens.amount("tokens").growth)
    foreseen = TokensForeseen(
        by_split=by_split,
        expected=config.expected_tokens,
        longest=longest,
        vocab_size=vocab_size,
        counted=counted,
    )
    count, per = amount(config.expected_tokens)
    return Estimate(
        disk={"tokens": count * TOKEN_BYTES},
        disk_per=per,
        notes=_pixels(outlook.inputs.get("target")),
        growth=growth,
        foreseen=foreseen,
    )


def _longest(shard: Path) -> int:
    """Tokens of the longest sample of a shard: of its file, only the header and the offsets are read."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))["token_offsets"]["data_offsets"]
        file.seek(begin, os.SEEK_CUR)
        offsets = array("q", file.read(end - begin))  # int64, as token_shards writes them
    return max(after - before for before, after in pairwise(offsets))


def _pixels(target: TargetForeseen | None) -> tuple[str, ...]:
    """The size of an image token; their number is unknown before."""
    if target is None or target.sizes.seeing is None:
        return ()
    size = target.sizes.pixel_bytes
    return (f"pixels need {size:,} bytes for every token of an image, {shown_bytes(size * MILLION)} per million",)
