"""Batches decoded plainly and speculatively in turns, and timed.

The ways, plain and speculative in blocks of each size, take turns batch by batch, and each batch begins with another
way, so that a slow moment of the machine, and the cost of the first pass over the same prompts, affect all equally.
Results are kept batch by batch in a journal, which survives a stop or a kill.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, asdict, define, evolve, field, frozen

from dsl.errors import StopRequested
from dsl.stage import Stage
from ops.evaluate.prompts import Prompt, by_length
from ops.evaluate.statistics import BatchTime
from ops.lib.data.files import json_line
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.chain import ChainHead
from ops.lib.drafts.decoding.clock import DecodeClock, Part, synchronise
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import (
    DecodeSettings,
    decode_plain_batch,
    decode_speculative_batch,
)
from ops.lib.drafts.decoding.decode_options import ChainUse, DraftUse
from ops.lib.target.model import Target


@frozen
class PromptResult:
    """The answers to one prompt. random: with the untrained draft, if measured.

    blocks: a further block size, in digits -> the speculative answer in blocks of it.
    """

    id: str
    category: str
    plain: Decoded
    speculative: Decoded
    random: Decoded | None
    blocks: Mapping[str, Decoded] = Factory(dict)

    def in_blocks(self, size: int) -> PromptResult:
        """The answers with the speculative one in blocks of another size."""
        return evolve(self, speculative=self.blocks[str(size)], random=None, blocks={})


@frozen
class BatchResult:
    """The answers of a batch, and its times. parts: "plain" and "speculative" -> part of the work -> seconds.

    blocks: a further block size, in digits -> the same parts of speculative decoding in blocks of it.
    """

    results: tuple[PromptResult, ...]
    time: BatchTime
    parts: Mapping[str, Mapping[str, float]]
    blocks: Mapping[str, Mapping[str, float]] = Factory(dict)

    def in_blocks(self, size: int) -> BatchResult:
        """The batch as decoded in blocks of another size, beside the same plain answers."""
        results = tuple(result.in_blocks(size) for result in self.results)
        parts = self.blocks[str(size)]
        tokens = sum(len(result.speculative.tokens) for result in results)
        time = evolve(self.time, speculative_seconds=sum(parts.values()), speculative_tokens=tokens)
        return BatchResult(results, time, {**self.parts, "speculative": parts})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BatchResult:
        results = []
        for row in values["results"]:
            answers = {way: row[way] and _decoded(row[way]) for way in ("plain", "speculative", "random")}
            blocks = {size: _decoded(answer) for size, answer in row["blocks"].items()}
            results.append(PromptResult(row["id"], row["category"], **answers, blocks=blocks))
        return cls(tuple(results), BatchTime(**values["time"]), values["parts"], values["blocks"])


@define
class Journal:
    """A file of decoded batches, one a line, in the order of decoding.

    wanted: the ids of all prompts in that order. A last line cut by a kill is removed, and so are results of other
    prompts.
    """

    path: Path
    wanted: Sequence[str]
    batches: list[BatchResult] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        written = self.path.read_bytes() if self.path.exists() else b""
        kept = 0
        for line in written[: written.rfind(b"\n") + 1].splitlines(keepends=True):
            batch = BatchResult.from_json(json.loads(line))
            done = self.prompts_done
            if [result.id for result in batch.results] != list(self.wanted[done : done + len(batch.results)]):
                break
            self.batches.append(batch)
            kept += len(line)
        if kept < len(written):
            os.truncate(self.path, kept)  # not rewritten: a kill in between would lose all

    @property
    def prompts_done(self) -> int:
        return sum(len(batch.results) for batch in self.batches)

    def add(self, batch: BatchResult) -> None:
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json_line(asdict(batch)))
        self.batches.append(batch)


def _decoded(values: Mapping[str, Any]) -> Decoded:
    near = {
        int(place): {int(token): distance for token, distance in tokens.items()}
        for place, tokens in values["near"].items()
    }
    confidence = tuple(map(tuple, values["confidence"]))
    return Decoded(tuple(values["tokens"]), tuple(values["accepted"]), tuple(values["margins"]), near, confidence)


WARM_UP_TOKENS = 1
JOURNAL = "decoded"  # the beginning of the names of journals in the work folder
WAYS = ("plain", "speculative")
PARTS: tuple[Part, ...] = ("prefill", "draft", "verify")


@frozen
class Decoder:
    """Decodes batches plainly and speculatively.

    draft: or a head that proposes token by token. untrained: a draft with random weights, or None. block_sizes: further
    ones, besides that of `use`.
    """

    target: Target
    draft: DraftModel | ChainHead
    untrained: DraftModel | None
    use: DraftUse | ChainUse
    settings: DecodeSettings
    block_sizes: Sequence[int] = ()

    def plain(self, samples: Sequence[TokenSample], clock: DecodeClock | None = None) -> list[Decoded]:
        return decode_plain_batch(self.target, samples, self.settings, clock)

    def speculative(
        self,
        draft: DraftModel | ChainHead,
        samples: Sequence[TokenSample],
        clock: DecodeClock | None = None,
        block_size: int | None = None,
    ) -> list[Decoded]:
        use = self.use if block_size is None else evolve(self.use, block_size=block_size)
        return decode_speculative_batch(self.target, draft, samples, self.settings, use, clock)

    def batch(self, prompts: Sequence[Prompt], first: int) -> BatchResult:
        """Decode one batch plainly and speculatively, with times, and then with the random draft, without.

        first: the way that begins; a number beyond the last one counts on from the first.
        """
        samples = [prompt.sample() for prompt in prompts]
        ways: dict[str, Callable[[DecodeClock], list[Decoded]]] = {
            "plain": lambda clock: self.plain(samples, clock),
            "speculative": lambda clock: self.speculative(self.draft, samples, clock),
        }
        ways |= {
            str(size): partial(self.speculative, self.draft, samples, block_size=size) for size in self.block_sizes
        }
        order = deque(ways)
        order.rotate(-first)
        answers, seconds, parts = {}, {}, {}
        for way in order:
            answers[way], seconds[way], parts[way] = _timed(ways[way], self.target.device)
        by_chance: Sequence[Decoded | None] = [None] * len(samples)
        if self.untrained is not None:
            by_chance = self.speculative(self.untrained, samples)
        tokens = {way: sum(len(answer.tokens) for answer in answers[way]) for way in WAYS}
        further = [str(size) for size in self.block_sizes]
        results = (
            PromptResult(
                prompt.id,
                prompt.category,
                answers["plain"][place],
                answers["speculative"][place],
                by_chance[place],
                {size: answers[size][place] for size in further},
            )
            for place, prompt in enumerate(prompts)
        )
        duration = BatchTime(seconds["plain"], tokens["plain"], seconds["speculative"], tokens["speculative"])
        of_ways, of_blocks = ({way: parts[way] for way in chosen} for chosen in (WAYS, further))
        return BatchResult(tuple(results), duration, of_ways, of_blocks)

    def warm_up(self, samples: Sequence[TokenSample]) -> None:
        """Decode a few tokens, so that initialisation on first use does not count for the first batch."""
        brief = evolve(self, settings=DecodeSettings(WARM_UP_TOKENS, self.settings.temperature))
        brief.plain(samples)
        for size in (self.use.block_size, *self.block_sizes):
            brief.speculative(self.draft, samples, block_size=size)


@frozen
class Answered:
    """Prompts with their results at a temperature, in the order of decoding, and the batches, of this size at most.

    block_size: of the speculative answers. unasked: id and reason of each answer behind which the next prompt of its
    conversation could not be asked.
    """

    temperature: float
    batch_size: int
    block_size: int
    prompts: list[Prompt]
    results: list[PromptResult]
    batches: list[BatchResult]
    unasked: list[tuple[str, str]]

    def in_blocks(self, size: int) -> Answered:
        """The same prompts as decoded in blocks of another size, beside the same plain answers."""
        results = [result.in_blocks(size) for result in self.results]
        return evolve(self, block_size=size, results=results, batches=[batch.in_blocks(size) for batch in self.batches])


def decode_conversations(
    decoder: Decoder, prompts: Sequence[Prompt], batch_size: int, stage: Stage, journal: str = JOURNAL
) -> Answered:
    """Decode prompts, and then those that follow from the target's plain answers, until none follows.

    journal: the beginning of the names of the journals. Raises as `decode_in_turns`.
    """
    found = Answered(decoder.settings.temperature, batch_size, decoder.use.block_size, [], [], [], [])
    journals = (f"{journal}{turn or ''}.jsonl" for turn in count())
    while prompts:
        results, batches = decode_in_turns(decoder, prompts, batch_size, stage, next(journals))
        found.prompts.extend(prompts)
        found.results.extend(results)
        found.batches.extend(batches)
        following = []
        for prompt, result in zip(prompts, results, strict=True):
            try:
                following += [] if prompt.follow is None else [prompt.follow(result.plain.tokens)]
            except Unusable as fault:
                found.unasked.append((prompt.id, f"{fault.reason}: {fault.detail}"))
        prompts = following
    return found


def decode_in_turns(
    decoder: Decoder, prompts: Sequence[Prompt], batch_size: int, stage: Stage, file: str
) -> tuple[list[PromptResult], list[BatchResult]]:
    """The results in the order of the prompts, and the batches; those of an earlier attempt are read from work_dir.

    file: the name of the journal. Raises StopRequested; results so far are kept.
    """
    order = by_length(prompts)
    journal = Journal(stage.work_dir / file, [prompts[place].id for place in order])
    stage.progress(journal.prompts_done, len(prompts))
    if journal.prompts_done < len(prompts):
        decoder.warm_up(_warm_up_samples(prompts, order[journal.prompts_done :], batch_size))
    while (done := journal.prompts_done) < len(prompts):
        if stage.stop_requested():
            raise StopRequested(f"evaluation stopped; {done} of {len(prompts)} prompts are decoded and kept")
        batch = [prompts[place] for place in order[done : done + batch_size]]
        journal.add(decoder.batch(batch, first=len(journal.batches) % (2 + len(decoder.block_sizes))))
        stage.progress(journal.prompts_done, len(prompts))
    found = dict(zip(order, (result for batch in journal.batches for result in batch.results), strict=True))
    return [found[place] for place in range(len(prompts))], journal.batches


def _warm_up_samples(prompts: Sequence[Prompt], order: Sequence[int], batch_size: int) -> list[TokenSample]:
    """The shortest remaining samples, as many as a batch; the last one has an image if any prompt has one."""
    samples = [prompts[place].sample() for place in order[:batch_size]]
    if not any(sample.has_images for sample in samples):
        others = (prompts[place].sample() for place in order[batch_size:])
        with_image = next((sample for sample in others if sample.has_images), None)
        if with_image is not None:
            samples[-1] = with_image
    return samples


def _timed(
    decode: Callable[[DecodeClock], list[Decoded]], device: torch.device
) -> tuple[list[Decoded], float, dict[str, float]]:
    """The answers, the wall-clock seconds with the device's work, and their parts."""
    clock = DecodeClock(device)
    synchronise(device)
    start = time.perf_counter()
    answers = decode(clock)
    synchronise(device)
    seconds = time.perf_counter() - start
    parts: dict[str, float] = {part: clock.seconds[part] for part in PARTS}
    return answers, seconds, {**parts, "overhead": seconds - sum(parts.values())}
