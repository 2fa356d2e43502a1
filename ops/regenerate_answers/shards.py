"""Shards of the samples to answer: each is one file of outcomes in the work folder, complete or absent.

The answers of an unfinished shard are kept in its journal as each of them ends. It survives a stop, a kill and a crash
of the machine, and another worker continues with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from dsl.files import append_lines, read_lines
from dsl.stage import Stage
from ops.ingest.sample import CONVERSATION, LAST
from ops.lib.data.files import read_jsonl, write_jsonl
from ops.lib.data.shared_shards import partial_path, publish, published_ranges
from ops.regenerate_answers.op import RegenerateAnswers

ANSWERS = ".answers"
EVERY_S = 2.0


@frozen
class Answer:
    """One answer of the target, before any filter.

    tokens: their number, including EOS. retokenised_differently: tokenize_chat splits its text into other tokens.
    prompted_differently: a server read other prompt tokens than tokenize_chat gives. reason: why the answer cannot be
    used, "" if it can. ids: the generated tokens, None if a server does not report them. called:
    whether it calls tools; calls: as in samples, None if they cannot be read, and then they are in the text.
    reasoning: the thought, where the target thinks in special tokens; else it is in the text.
    """

    text: str
    finish_reason: str
    tokens: int
    retokenised_differently: bool = False
    prompted_differently: bool = False
    reason: str = ""
    detail: str = ""
    ids: list[int] | None = None
    called: bool = False
    calls: list[dict[str, Any]] | None = None
    reasoning: str = ""

    def turn(self) -> dict[str, Any]:
        """The answer as a message."""
        content = [{"type": "text", "text": self.text}] if self.text or not self.calls else []
        more = {"reasoning_content": self.reasoning, "tool_calls": self.calls}
        return {"role": "assistant", "content": content, **{key: value for key, value in more.items() if value}}


Key = tuple[str, int]  # the sample's id, and which of its answers, from 0


@define
class Journal:
    """Answers in a file, one a line; an incomplete line, left by a kill, is passed over."""

    path: Path
    answers: dict[Key, Answer] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.answers = {(line["id"], line["turn"]): Answer(**line["answer"]) for line in read_lines(self.path)}

    def add(self, answers: Mapping[Key, Answer]) -> None:
        """Keep answers that ended together; they are on disk when this returns."""
        lines = [{"id": key[0], "turn": key[1], "answer": asdict(answer)} for key, answer in answers.items()]
        append_lines(self.path, lines, durable=True)
        self.answers |= answers


@frozen
class Shard:
    """Consecutive samples to answer; the file's name has their range, so another shard_samples never uses a wrong file.

    worker: the number of the worker that writes it.
    """

    start: int
    rows: list[dict[str, Any]]
    work_dir: Path
    worker: int = 0

    @property
    def path(self) -> Path:
        """The file of the outcomes, one per line in the order of the rows; it exists once all are known."""
        return self.work_dir / f"{self.start:08d}-{self.start + len(self.rows):08d}.jsonl"

    @property
    def is_finished(self) -> bool:
        return self.path.exists()

    def journal(self) -> Journal:
        """The answers of an earlier attempt, and the file for new ones."""
        return Journal(self.path.with_suffix(ANSWERS))

    def finish(self, outcomes: Iterable[dict[str, Any]]) -> None:
        """Write the outcomes, and remove the journal."""
        partial = partial_path(self.path, self.worker)
        write_jsonl(partial, outcomes)
        publish(partial, self.path)
        self.path.with_suffix(ANSWERS).unlink(missing_ok=True)


@define
class Progress:
    """Reports how many answers of all workers have ended, at most every EVERY_S seconds.

    answers_before: the answers wanted before each sample, and then of all. tokens: that this attempt has generated.
    """

    stage: Stage
    answers_before: Sequence[int]
    tokens: int = 0
    _reported_at: float = -math.inf

    def advance(self, tokens: int = 0) -> None:
        """Take in generated tokens; to be called often."""
        self.tokens += tokens
        if time.monotonic() - self._reported_at >= EVERY_S:
            self.report()

    def report(self) -> None:
        """Report what the work folder holds."""
        self._reported_at = time.monotonic()
        done = self._ended()
        self.stage.progress(done, self.answers_before[-1])
        if self.tokens and self.stage.workers == 1:
            self.stage.log({"regenerate/tokens_of_attempt": self.tokens}, step=done)

    def _ended(self) -> int:
        """Answers in published shards, dropped ones included, and in journals."""
        folder = self.stage.work_dir
        finished = published_ranges(folder, ".jsonl")
        count = sum(self.answers_before[stop] - self.answers_before[start] for start, stop in finished)
        for start, stop in set(published_ranges(folder, ANSWERS)).difference(finished):
            with suppress(FileNotFoundError):  # its shard is published meanwhile
                count += (folder / f"{start:08d}-{stop:08d}{ANSWERS}").read_bytes().count(b"\n")
        return count


def shards(folder: Path, config: RegenerateAnswers, work_dir: Path, worker: int = 0) -> Iterator[Shard]:
    """The shards: samples of the chosen splits, in the order of the file, `shard_samples` each."""
    start, rows = 0, []
    for row in asked_rows(folder, config):
        if row["split"] in config.splits:
            rows.append(row)
        if len(rows) == config.shard_samples:
            yield Shard(start, rows, work_dir, worker)
            start, rows = start + len(rows), []
    if rows:
        yield Shard(start, rows, work_dir, worker)


def asked_rows(folder: Path, config: RegenerateAnswers) -> Iterator[dict[str, Any]]:
    """The rows of all splits; with history = "data", one for each answer of a row that is answered."""
    for row in read_jsonl(folder / "samples.jsonl"):
        if config.history == "data" and row["split"] in config.splits:
            yield from _rows_of_answers(row)
        else:
            yield row


def _rows_of_answers(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each answer, which alone is learnt, behind the data's turns; the row itself if it has one to learn."""
    turns = turns_of(row)
    places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    if len(places) < 2 or row.get("learnt") == LAST:
        yield row
        return
    for number, place in enumerate(places, 1):
        messages = turns[: place + 1]
        images = row["images"][: sum(part["type"] == "image" for turn in messages for part in turn["content"])]
        of_answer = {"id": f"{row['id']}@{number}", CONVERSATION: row["id"], "learnt": LAST}
        yield {**row, **of_answer, "messages": messages, "images": images}


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a sample, with an empty answer at the end if the last turn is the user's, or a result."""
    turns = list(row["messages"])
    spoken = [turn["role"] for turn in turns if turn["role"] != "system"]
    return [*turns, {"role": "assistant", "content": []}] if spoken[-1:] in (["user"], ["tool"]) else turns
