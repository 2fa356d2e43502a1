"""The answers to the val prompts at the end of a paused training, by which trainings are compared prompt by prompt.

val_answers.jsonl   {"id", "category", "generated", "steps"} a line, in the order of the prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import asdict, frozen

from ops.lib.data.files import read_jsonl, write_jsonl

VAL_ANSWERS = "val_answers.jsonl"


@frozen
class Answer:
    """An answer to a prompt: its tokens from verification steps, as `Decoded.generated`, and the number of steps."""

    id: str
    category: str
    generated: int
    steps: int


def write_answers(folder: Path, answers: Sequence[Answer]) -> None:
    """Write the answers into an artifact; there are none where the training does not measure tau."""
    write_jsonl(folder / VAL_ANSWERS, map(asdict, answers))


def read_answers(folder: Path) -> list[Answer]:
    """The answers in a DraftCheckpoint; empty without the file. Raises DataError for a damaged file."""
    file = folder / VAL_ANSWERS
    return [Answer(**row) for row in read_jsonl(file)] if file.is_file() else []
