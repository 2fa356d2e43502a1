"""A mistake in a draft's files, as the gate reports it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from dsl.errors import DataError

REWRITE = "write the export again: dflow resume RUN --from export"


@frozen
class Mistake:
    """what: the file and field, and what is wrong with it; effect: what the engine would do; remedy: what to do now."""

    what: str
    effect: str
    remedy: str
    engine: str = "SGLang"

    def __str__(self) -> str:
        return f"  {self.what}\n    {self.engine}: {self.effect}\n    remedy: {self.remedy}"


def refuse(directory: Path, mistakes: Sequence[Mistake], more: str = "") -> None:
    """Raises DataError that lists all mistakes, with `more` behind them; does nothing where there are none."""
    if mistakes:
        listed = "\n".join(str(mistake) for mistake in mistakes)
        raise DataError(
            f"{directory}: the draft breaks the serving contract:\n{listed}" + (f"\n  {more}" if more else "")
        )
