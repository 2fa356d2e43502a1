"""Shards of the samples to answer: each is one file of outcomes in the work folder, whole or not there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from ops.lib.data.files import finish_file, read_jsonl, write_jsonl
from ops.regenerate_answers.journal import Journal
from ops.regenerate_answers.op import RegenerateAnswers


@frozen
class Shard:
    """Consecutive samples to answer. The file's name tells which, so that another shard_samples takes no wrong file."""

    start: int
    rows: list[dict[str, Any]]
    work_dir: Path

    @property
    def path(self) -> Path:
        """Where the outcomes lie, one a line in the order of the rows, once all of them are there."""
        return self.work_dir / f"{self.start:08d}-{self.start + len(self.rows):08d}.jsonl"

    @property
    def is_finished(self) -> bool:
        return self.path.exists()

    def journal(self) -> Journal:
        """The answers that an earlier attempt left, and the place for new ones."""
        return Journal(self.path.with_suffix(".answers"))

    def finish(self, outcomes: Iterable[dict[str, Any]]) -> None:
        """Write the outcomes; the journal has served."""
        partial = self.path.with_suffix(".partial")
        write_jsonl(partial, outcomes)
        finish_file(partial, self.path)
        self.path.with_suffix(".answers").unlink(missing_ok=True)


def shards(folder: Path, config: RegenerateAnswers, work_dir: Path) -> Iterator[Shard]:
    """The samples of the chosen splits, in the order of the file, `shard_samples` at a time."""
    start, rows = 0, []
    for row in read_jsonl(folder / "samples.jsonl"):
        if row["split"] in config.splits:
            rows.append(row)
        if len(rows) == config.shard_samples:
            yield Shard(start, rows, work_dir)
            start, rows = start + len(rows), []
    if rows:
        yield Shard(start, rows, work_dir)
