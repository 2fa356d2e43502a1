"""The prompts decoded so far, kept batch by batch: what a stop or a kill leaves of an evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from ops.evaluate.statistics import BatchTime
from ops.lib.data.files import json_line
from ops.lib.drafts.decoding.decode import Decoded


@frozen
class PromptResult:
    """What was decoded for one prompt; random: with the draft that nobody trained, where that is measured."""

    id: str
    category: str
    plain: Decoded
    speculative: Decoded
    random: Decoded | None


@frozen
class BatchResult:
    """A batch, and what it took. parts: "plain" and "speculative" -> part of the work -> seconds."""

    results: tuple[PromptResult, ...]
    time: BatchTime
    parts: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> BatchResult:
        results = (
            PromptResult(
                row["id"],
                row["category"],
                _decoded(row["plain"]),
                _decoded(row["speculative"]),
                None if row["random"] is None else _decoded(row["random"]),
            )
            for row in told["results"]
        )
        return cls(tuple(results), BatchTime(**told["time"]), told["parts"])


@define
class Journal:
    """Batches in a file, one a line, in the order in which they were decoded.

    wanted: the ids of all prompts in that order. Half a line, which a kill may leave, is cut off, and so is what other
    prompts than these left there.
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
            os.truncate(self.path, kept)  # never written anew: a kill in between would lose all

    @property
    def prompts_done(self) -> int:
        return sum(len(batch.results) for batch in self.batches)

    def add(self, batch: BatchResult) -> None:
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json_line(batch.to_json()))
        self.batches.append(batch)


def _decoded(told: Mapping[str, Any]) -> Decoded:
    near = {
        int(place): {int(token): distance for token, distance in tokens.items()}
        for place, tokens in told["near"].items()
    }
    return Decoded(tuple(told["tokens"]), tuple(told["accepted"]), tuple(told["margins"]), near)
