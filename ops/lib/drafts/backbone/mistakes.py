"""A mistake in a draft's files, as the gate reports it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from dsl.errors import DataError

REWRITE = "write the export again: dflow resume RUN --from export"
REIMPORT = "get the draft's files from its publisher again, and import them with the target that they were made for"


@frozen
class Mistake:
    """what: the file and field, and what is wrong with it; effect: what the engine would do; remedy: what to do now."""

    what: str
    effect: str
    remedy: str
    engine: str = "SGLang"

    def __str__(self) -> str:
        return f"  {self.what}\n    {self.engine}: {self.effect}\n    remedy: {self.remedy}"


def refuse(directory: Path, mistakes: Sequence[Mistake], more: str = "", *, is_imported: bool = False) -> None:
    """Raises DataError that lists all mistakes, with `more` behind them; does nothing where there are none.

    is_imported: of a draft that was trained elsewhere, which no node can write again.
    """
    if mistakes:
        listed = "\n".join(str(of_import(mistake) if is_imported else mistake) for mistake in mistakes)
        raise DataError(
            f"{directory}: the draft breaks the serving contract:\n{listed}" + (f"\n  {more}" if more else "")
        )


def of_import(mistake: Mistake) -> Mistake:
    """The mistake with a remedy that does not ask for another export or training."""
    asks = any(words in mistake.remedy for words in (REWRITE, "train again", "train without"))
    return evolve(mistake, remedy=REIMPORT) if asks else mistake
