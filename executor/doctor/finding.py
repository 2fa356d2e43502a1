"""One line of `dflow doctor`."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Level = Literal["ok", "warning", "missing"]


@frozen
class Finding:
    """What was checked, its state, what was found, and what to do about it.

    missing: something does not work without it. is_fatal: dflow cannot run at all without it.
    """

    name: str
    level: Level
    message: str
    remedy: str = ""
    is_fatal: bool = False

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:7}  {self.name}: {self.message}{remedy}"
