"""Needs of `tokenize_chat`: the disk for tokens and pixels; and the tokens to expect after it."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import evolve

from dsl.estimate import Estimate, Growth, Outlook
from dsl.op import is_builtin
from ops.lib.data.files import artifact_file, read_json
from ops.lib.estimates import (
    SamplesForeseen,
    TargetForeseen,
    TokensCounted,
    TokensForeseen,
    amount,
    counted_tokens,
    kept_samples,
)
from ops.lib.target.checkpoint_check import processor_folder_mistakes, stored_bytes
from ops.lib.target.token_ids import Vocabulary
from ops.tokenize_chat.op import TokenizeChat

BUILTIN_IDS: dict[str, Any] = {"eos_token_ids": (2,), "pad_token_id": 0}  # by SPECIAL_TOKENS of builtin.py
TOKEN_BYTES = 5  # input_ids int32 and loss_mask uint8
MOST_OFFSETS = 64 << 20  # bytes of a shard's offsets


def smoke(config: TokenizeChat, samples: int) -> dict[str, Any]:
    """The expected tokens are those of all samples."""
    return {"expected_tokens": None}


def estimate(config: TokenizeChat, outlook: Outlook) -> Estimate:
    """Counted if the tokens exist, else from expected_tokens, else for a million tokens."""
    source: SamplesForeseen | None = outlook.inputs["samples"]
    target: TargetForeseen | None = outlook.inputs.get("target")
    foreseen = _promised(config, source, target)
    if outlook.artifact is not None:
        shards = read_json(outlook.artifact / "tokens.json")["shards"]
        longest = max(
            (_longest(artifact_file(outlook.artifact, shard["file"])) for shard in shards), default=config.max_length
        )
        foreseen = evolve(
            TokensForeseen.read(outlook.artifact, outlook.identity, longest),
            expected=config.expected_tokens,
            prompts_only=config.prompts_only,
        )
    counted = growth = None
    if outlook.trial is not None and source is not None and source.samples is not None:
        samples = kept_samples(outlook.trial.artifact, source.samples)
        counted = TokensCounted(samples=samples, tokens=counted_tokens(outlook.trial.artifact, samples))
        growth = Growth(series=(source.samples.amount("samples"),), output=counted.tokens.amount("tokens").growth)
    foreseen = evolve(foreseen, counted=counted, identity=outlook.identity)
    count, per = amount(config.expected_tokens)
    return Estimate(
        disk={"tokens": count * TOKEN_BYTES},
        disk_per=per,
        growth=growth,
        foreseen=foreseen,
    )


def _promised(config: TokenizeChat, source: SamplesForeseen | None, target: TargetForeseen | None) -> TokensForeseen:
    """By the files of the processor, or of the target whose processor it is."""
    promised = TokensForeseen(
        by_split=None,
        expected=config.expected_tokens,
        longest=config.max_length,
        vocab_size=None,
        empty=source.empty if source is not None else frozenset(),
        prompts_only=config.prompts_only,
    )
    if target is not None:
        return evolve(promised, eos_token_ids=target.eos_token_ids, pad_token_id=target.pad_token_id)
    if is_builtin(config.processor):
        return evolve(promised, vocab_size=config.vocab_size, is_bound=True, **BUILTIN_IDS)
    vocabulary = None if processor_folder_mistakes(config.processor) else Vocabulary.of(Path(config.processor))
    if vocabulary is None:
        return promised
    return evolve(
        promised,
        vocab_size=max(vocabulary.size, len(vocabulary.ordinary) + len(vocabulary.special)),
        eos_token_ids=vocabulary.eos_token_ids,
        pad_token_id=vocabulary.pad_token_id,
    )


def _longest(shard: Path) -> int:
    """Tokens of the longest sample of a shard: of its file, only the header and the offsets are read."""
    offsets = array("q", stored_bytes(shard, "token_offsets", MOST_OFFSETS))  # int64, as token_shards writes them
    return max((after - before for before, after in pairwise(offsets)), default=0)
