"""The global steps of training, without torch: shuffle every epoch by hash, then fill steps up to their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from attrs import frozen

from dsl.errors import DataError
from ops.lib.data.batching import padded_length
from ops.lib.data.files import read_jsonl
from ops.shard_sequence.op import SPLIT, ShardSequence


@frozen
class Step:
    """One global training step. samples: indices into the split's samples. tokens: including padding."""

    step: int
    epoch: int
    samples: tuple[int, ...]
    tokens: int


def plan_steps(
    lengths: Sequence[int], tokens_per_step: int, pad_multiple: int, epochs: int, seed: int
) -> Iterator[Step]:
    """The steps in order. Every sample is used once per epoch; no step has samples of two epochs."""
    padded = [padded_length(length, pad_multiple) for length in lengths]
    longest = max(range(len(padded)), key=padded.__getitem__)
    if padded[longest] > tokens_per_step:
        raise DataError(
            f"sample {longest} of the split {SPLIT} has {lengths[longest]} tokens, {padded[longest]} when padded: more "
            f"than tokens_per_step = {tokens_per_step}; raise it, or lower max_length of tokenize_chat"
        )
    step = 0
    for epoch in range(epochs):
        samples: list[int] = []
        tokens = 0
        for sample in epoch_order(len(lengths), seed, epoch):
            if tokens + padded[sample] > tokens_per_step:
                yield Step(step, epoch, tuple(samples), tokens)
                step, samples, tokens = step + 1, [], 0
            samples.append(sample)
            tokens += padded[sample]
        yield Step(step, epoch, tuple(samples), tokens)
        step += 1


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends only on (seed, epoch): sorted by the sha256 of each index."""
    return sorted(range(count), key=lambda sample: hashlib.sha256(f"{seed}/{epoch}/{sample}".encode()).digest())


@cache
def steps_of_tokens(folder: Path, config: ShardSequence) -> int | None:
    """The number of steps that `config` plans for the token shards in a folder, whose features have equal lengths.

    None where there is no plan: for a split without samples, and for a sample longer than a step.
    """
    lengths = [row["tokens"] for row in read_jsonl(folder / "samples.jsonl") if row["split"] == SPLIT]
    if not lengths or padded_length(max(lengths), config.pad_multiple) > config.tokens_per_step:
        return None
    steps = plan_steps(lengths, config.tokens_per_step, config.pad_multiple, config.epochs, config.seed or 0)
    return sum(1 for _ in steps)
