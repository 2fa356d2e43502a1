"""One thing that is wrong, or worth knowing, and what to do about it: of a pipeline, a file, a node, a machine.

Whoever finds it gives data. It is printed at the edge, by `line` or `block`; the record of a run, the report and MLflow
hold and show the same object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from attrs import evolve, frozen

from dsl.errors import MOST_OF_MESSAGE, MOST_SHOWN, on_one_line, shortened

# good, info: nothing is wrong. unknown: not measured. fatal: nothing works before it is corrected.
Level = Literal["good", "info", "unknown", "warning", "error", "fatal"]


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
    """A key of a pipeline by its path ("node.train.lr"), or a command's argument, with the place where it
    is written.
    """

    path: str = ""
    position: Position | None = None

    def __str__(self) -> str:
        position = [str(self.position)] if self.position is not None else []
        return ": ".join([*position, *([on_one_line(shortened(self.path, MOST_SHOWN))] if self.path else [])])


@frozen
class File:
    """A file, and the field or tensor inside it where a finding concerns only that."""

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
    """A finding: something wrong or worth knowing, such as a mistake.

    what: its description. advice: what to do about it, "" for nothing; RUN in its commands stands for the run's id.
    code: the kind, where programs or users tell kinds apart ("killed", "GPU"); "" otherwise.
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
        """The path of the pipeline's key that the finding concerns; "" for none."""
        return self.where.path if isinstance(self.where, Field) else ""

    @property
    def position(self) -> Position | None:
        """The place where the key is written; None where it is not known, or for no key."""
        return self.where.position if isinstance(self.where, Field) else None

    def at(self, path: str, position: Position | None = None) -> Finding:
        """The finding for another key. position: where that is written, if it is another place."""
        return evolve(self, where=Field(path, position or self.position))

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON object without its empty fields; `from_json` reads it."""
        where: dict[str, str] = {}
        if isinstance(self.where, Node):
            where = {"node": self.where.id}
        elif isinstance(self.where, File):
            where = {"file": self.where.path, "part": self.where.part}
        elif isinstance(self.where, Field):
            where = {"field": self.path, "position": "" if self.position is None else str(self.position)}
        values = {"code": self.code, **where, "what": self.what, "advice": self.advice, "level": self.level}
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that `to_json` wrote. Raises ValueError for any other data, and for one that says nothing."""
        is_text = all(isinstance(value, str) for value in data.values())
        if not is_text or not data.get("what") or data.get("level") not in get_args(Level):
            raise ValueError("not a finding")
        where: Field | File | Node | None = None
        if "node" in data:
            where = Node(data["node"])
        elif "file" in data:
            where = File(data["file"], data.get("part", ""))
        elif "field" in data or "position" in data:
            where = Field(data.get("field", ""), Position(data["position"]) if "position" in data else None)
        return cls(data["what"], where, data.get("advice", ""), data["level"], data.get("code", ""))


def for_run(text: str, run: str) -> str:
    """The text with RUN in dflow's commands replaced by the run's id; unchanged without a run."""
    return re.sub(r"(\bdflow [a-z-]+ )RUN\b", rf"\g<1>{run}", text) if run else text


def line(finding: Finding, run: str = "") -> str:
    """`where: what (advice)`; several lines where `what` has them."""
    tail = f" ({finding.advice})" if finding.advice else ""
    return for_run("\n".join(_lines(finding, shortened(finding.what, MOST_OF_MESSAGE) + tail)), run)


def block(finding: Finding, run: str = "", below: Iterable[str] = ()) -> str:
    """The finding as a block of lines: `where: what`, the lines `below`, and the advice.

    Further lines of `what` are indented, so that none looks like the advice.
    """
    first, *more = _lines(finding, finding.what)
    lines = [first, *(f"    {each}" for each in (*more, *below))]
    return for_run("\n".join([*lines, f"  what to do: {finding.advice}"] if finding.advice else lines), run)


def blocks(findings: Iterable[Finding]) -> str:
    """The findings as indented text, to stand below a line that introduces them."""
    return "\n".join(f"  {each}" for finding in findings for each in block(finding).split("\n"))


def _lines(finding: Finding, text: str) -> list[str]:
    first, *more = map(on_one_line, text.split("\n"))
    match finding.where:
        case None:
            head = ""
        case File(_, part) if part:
            head = f"{finding.where} "
        case Node() if finding.level == "error":
            head = f"{finding.where} failed: "
        case _:
            head = f"{finding.where}: " if str(finding.where) else ""
    return [head + first, *more]
