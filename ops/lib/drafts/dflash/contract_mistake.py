"""One thing wrong with an export, told so that a user can act on it: the field, what SGLang would do, the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from dsl.errors import DataError

REWRITE = "write the export again: dflow resume RUN --from export"


@frozen
class Mistake:
    """what: the file and field, and what is wrong with it; sglang: what a server would do; remedy: what to do now."""

    what: str
    sglang: str
    remedy: str

    def __str__(self) -> str:
        return f"  {self.what}\n    SGLang: {self.sglang}\n    remedy: {self.remedy}"


def refuse(directory: Path, mistakes: Sequence[Mistake], more: str = "") -> None:
    """Raises DataError that lists all mistakes, with `more` behind them; does nothing where there are none."""
    if mistakes:
        listed = "\n".join(str(mistake) for mistake in mistakes)
        raise DataError(
            f"{directory}: the draft breaks the serving contract:\n{listed}" + (f"\n  {more}" if more else "")
        )
