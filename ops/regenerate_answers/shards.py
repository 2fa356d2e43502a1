"""Shards of the samples to answer: each is one file of outcomes in the work folder, complete or absent.

The answers of an unfinished shard are kept batch by batch in its journal, which survives a stop or a kill: another
worker continues with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from ops.lib.data.files import json_line, read_jsonl, write_jsonl
from ops.lib.data.shared_shards import partial_path, publish
from ops.regenerate_answers.op import RegenerateAnswers


@frozen
class Answer:
    """One answer of the target, before any filter.

    tokens: their number, including EOS. retokenised_differently: tokenize_chat splits its text into other tokens.
    prompted_differently: a server read other prompt tokens than tokenize_chat gives. reason: why the answer cannot be
    used, "" if it can.
    """

    text: str
    finish_reason: str
    tokens: int
    retokenised_differently: bool = False
    prompted_differently: bool = False
    reason: str = ""
    detail: str = ""


Key = tuple[str, int]  # the sample's id, and which of its answers, from 0


@define
class Journal:
    """The file of a shard's answers, one line per batch; a line cut by a kill is removed."""

    path: Path
    answers: dict[Key, Answer] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.path.exists():
            return
        written = self.path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):
            os.truncate(self.path, len(whole))  # not rewritten: a kill in between would lose all
        for line in whole.splitlines():
            self.answers |= {(sample_id, turn): Answer(**answer) for sample_id, turn, answer in json.loads(line)}

    def add(self, answers: Mapping[Key, Answer]) -> None:
        """Append the answers of one batch to the journal's file."""
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json_line([[*key, asdict(answer)] for key, answer in answers.items()]))
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
        """The journal with answers of an earlier attempt, and room for new ones."""
        return Journal(self.path.with_suffix(".answers"))

    def finish(self, outcomes: Iterable[dict[str, Any]]) -> None:
        """Write the outcomes, and remove the journal."""
        partial = partial_path(self.path, self.worker)
        write_jsonl(partial, outcomes)
        publish(partial, self.path)
        self.path.with_suffix(".answers").unlink(missing_ok=True)


def shards(folder: Path, config: RegenerateAnswers, work_dir: Path, worker: int = 0) -> Iterator[Shard]:
    """The shards: samples of the chosen splits, in the order of the file, `shard_samples` each."""
    start, rows = 0, []
    for row in read_jsonl(folder / "samples.jsonl"):
        if row["split"] in config.splits:
            rows.append(row)
        if len(rows) == config.shard_samples:
            yield Shard(start, rows, work_dir, worker)
            start, rows = start + len(rows), []
    if rows:
        yield Shard(start, rows, work_dir, worker)
