"""Batches decoded plainly and speculatively in turns, and timed.

The two ways alternate batch by batch, and every second batch begins with the other way, so that a slow moment
of the machine, and the cost of the first of two passes over the same prompts, affect both equally.
Results are kept batch by batch in a journal, which survives a stop or a kill.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, define, field, frozen

from dsl.errors import StopRequested
from dsl.stage import Stage
from ops.evaluate.prompts import Prompt, by_length
from ops.evaluate.statistics import BatchTime
from ops.lib.data.files import json_line
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.clock import DecodeClock, Part, synchronise
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import (
    DecodeSettings,
    decode_plain_batch,
    decode_speculative_batch,
)
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.target.model import Target


@frozen
class PromptResult:
    """The answers to one prompt. random: with the untrained draft, if measured."""

    id: str
    category: str
    plain: Decoded
    speculative: Decoded
    random: Decoded | None


@frozen
class BatchResult:
    """The answers of a batch, and its times. parts: "plain" and "speculative" -> part of the work -> seconds."""

    results: tuple[PromptResult, ...]
    time: BatchTime
    parts: Mapping[str, Mapping[str, float]]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> BatchResult:
        results = []
        for row in values["results"]:
            answers = {way: row[way] and _decoded(row[way]) for way in ("plain", "speculative", "random")}
            results.append(PromptResult(row["id"], row["category"], **answers))
        return cls(tuple(results), BatchTime(**values["time"]), values["parts"])


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
PARTS: tuple[Part, ...] = ("prefill", "draft", "verify")


@frozen
class Decoder:
    """Decodes batches plainly and speculatively. untrained: a draft with random weights, or None."""

    target: Target
    draft: DraftModel
    untrained: DraftModel | None
    use: DraftUse
    settings: DecodeSettings

    def plain(self, samples: Sequence[TokenSample], clock: DecodeClock | None = None) -> list[Decoded]:
        return decode_plain_batch(self.target, samples, self.settings, clock)

    def speculative(
        self, draft: DraftModel, samples: Sequence[TokenSample], clock: DecodeClock | None = None
    ) -> list[Decoded]:
        return decode_speculative_batch(self.target, draft, samples, self.settings, self.use, clock)

    def batch(self, prompts: Sequence[Prompt], plain_first: bool) -> BatchResult:
        """Decode one batch plainly and speculatively, with times, and then with the random draft, without."""
        samples = [prompt.sample() for prompt in prompts]
        ways: dict[str, Callable[[DecodeClock], list[Decoded]]] = {
            "plain": lambda clock: self.plain(samples, clock),
            "speculative": lambda clock: self.speculative(self.draft, samples, clock),
        }
        answers, seconds, parts = {}, {}, {}
        for way in ways if plain_first else reversed(ways):
            answers[way], seconds[way], parts[way] = _timed(ways[way], self.target.device)
        by_chance: Sequence[Decoded | None] = [None] * len(samples)
        if self.untrained is not None:
            by_chance = self.speculative(self.untrained, samples)
        tokens = {way: sum(len(answer.tokens) for answer in answers[way]) for way in answers}
        results = (
            PromptResult(prompt.id, prompt.category, plain, speculative, random)
            for prompt, plain, speculative, random in zip(
                prompts, answers["plain"], answers["speculative"], by_chance, strict=True
            )
        )
        duration = BatchTime(seconds["plain"], tokens["plain"], seconds["speculative"], tokens["speculative"])
        return BatchResult(tuple(results), duration, parts)

    def warm_up(self, samples: Sequence[TokenSample]) -> None:
        """Decode a few tokens, so that initialisation on first use does not count for the first batch."""
        brief = Decoder(
            self.target, self.draft, None, self.use, DecodeSettings(WARM_UP_TOKENS, self.settings.temperature)
        )
        brief.plain(samples)
        brief.speculative(self.draft, samples)


@frozen
class Answered:
    """Prompts with their results at a temperature, in the order of decoding, and the batches, of this size at most.

    unasked: id and reason of each answer behind which the next prompt of its conversation could not be asked.
    """

    temperature: float
    batch_size: int
    prompts: list[Prompt]
    results: list[PromptResult]
    batches: list[BatchResult]
    unasked: list[tuple[str, str]]


def decode_conversations(
    decoder: Decoder, prompts: Sequence[Prompt], batch_size: int, stage: Stage, journal: str = JOURNAL
) -> Answered:
    """Decode prompts, and then those that follow from the target's plain answers, until none follows.

    journal: the beginning of the names of the journals. Raises as `decode_in_turns`.
    """
    found = Answered(decoder.settings.temperature, batch_size, [], [], [], [])
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
        journal.add(decoder.batch(batch, plain_first=len(journal.batches) % 2 == 0))
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
