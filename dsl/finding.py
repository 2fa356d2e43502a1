"""One thing that is wrong, or worth knowing, and what to do about it: of a pipeline, a file, a node, a machine.

Whoever finds it gives data. It is printed at the edge, by `line` or `block`; the record of a run, the report and MLflow
hold and show the same object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from attrs import evolve, frozen

from dsl.errors import MOST_OF_MESSAGE, MOST_SHOWN, on_one_line, shortened

# good, info: nothing is wrong. unknown: not measured.
Level = Literal["good", "info", "unknown", "warning", "error"]


@frozen
class Position:
    """A place in a pipeline file; line and column count from 1, or are 0 for a place without lines.

    is_argument: file is not a file's name, but an argument on the command line as it was given: `-s train.lr=x`.
    """

    file: str
    line: int = 0
    column: int = 0
    is_argument: bool = False

    def __str__(self) -> str:
        if self.is_argument:
            return on_one_line(shortened(self.file, MOST_SHOWN))
        return on_one_line(f"{self.file}:{self.line}:{self.column}" if self.line else self.file)


@frozen
class Field:
    """A key of a pipeline by its path ("node.train.lr"), or an argument of a command, and where it is written."""

    path: str = ""
    position: Position | None = None

    def __str__(self) -> str:
        position = [str(self.position)] if self.position is not None else []
        return ": ".join([*position, *([on_one_line(shortened(self.path, MOST_SHOWN))] if self.path else [])])


@frozen
class File:
    """A file, and the field or the tensor in it, if only that is meant."""

    path: str
    part: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.part}" if self.part else self.path


@frozen
class Node:
    """A node of a run."""

    id: str

    def __str__(self) -> str:
        return self.id


@frozen
class Finding:
    """what: what was found. advice: what to do about it, "" for nothing; RUN in its commands stands for the run's id.

    code: the name of the kind, where a program or a user tells kinds apart ("killed", "GPU"); "" otherwise.
    """

    what: str
    where: Field | File | Node | None = None
    advice: str = ""
    level: Level = "error"
    code: str = ""

    def __str__(self) -> str:
        return line(self)

    @property
    def path(self) -> str:
        """The path of the key; "" for no key."""
        return self.where.path if isinstance(self.where, Field) else ""

    @property
    def position(self) -> Position | None:
        """Where the key is written."""
        return self.where.position if isinstance(self.where, Field) else None

    def at(self, path: str, position: Position | None = None) -> Finding:
        """The finding at another key; position: where it is written, if that is another place."""
        return evolve(self, where=Field(path, position or self.position))

    def of_run(self, run: str) -> Finding:
        """The finding with the run's id in the commands of its texts."""
        return evolve(self, what=of_run(self.what, run), advice=of_run(self.advice, run))


def of_run(text: str, run: str) -> str:
    """The text with the run's id for RUN in commands of dflow."""
    return re.sub(r"(\bdflow [a-z-]+ )RUN\b", rf"\g<1>{run}", text)


def line(finding: Finding) -> str:
    """`where: what (advice)`; several lines where `what` has them."""
    tail = f" ({finding.advice})" if finding.advice else ""
    return _placed(finding, shortened(finding.what, MOST_OF_MESSAGE) + tail)


def block(finding: Finding) -> str:
    """`where: what`, and the advice below it."""
    more = [f"what to do: {finding.advice}"] if finding.advice else []
    return "\n  ".join([*_placed(finding, finding.what).split("\n"), *more])


def blocks(findings: Iterable[Finding]) -> str:
    """All of them, indented below the line that introduces them."""
    return "\n".join(f"  {each}" for finding in findings for each in block(finding).split("\n"))


def _placed(finding: Finding, text: str) -> str:
    where = str(finding.where or "")
    is_part = isinstance(finding.where, File) and finding.where.part
    text = "\n".join(map(on_one_line, text.split("\n")))
    return f"{where}{' ' if is_part else ': '}{text}" if where else text
