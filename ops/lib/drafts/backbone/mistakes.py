"""What the gate says of a draft's files: the file and its field or tensor, what an engine does, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from dsl.errors import DataError
from dsl.finding import File, Finding, blocks

REWRITE = "write the export again: dflow resume RUN --from export"
REIMPORT = "get the draft's files from its publisher again, and import them with the target that they were made for"
OF_MAKER = "of its maker"  # the code of what only another export or training corrects


def mistake(
    file: str, wrong: str, effect: str, advice: str = REWRITE, *, part: str = "", engine: str = "SGLang", code: str = ""
) -> Finding:
    """file: "" for the draft as a whole. part: the field or the tensor. effect: what the engine does with it."""
    return Finding(
        f"{wrong}\n{engine}: {effect}",
        File(file, part) if file else None,
        advice,
        code=OF_MAKER if advice == REWRITE else code,
    )


def refuse(directory: Path, mistakes: Sequence[Finding], more: str = "", *, is_imported: bool = False) -> None:
    """Raises DataError that lists all mistakes, with `more` behind them; does nothing where there are none.

    is_imported: of a draft that was trained elsewhere, which no node can write again.
    """
    if mistakes:
        listed = blocks(map(of_import, mistakes) if is_imported else mistakes)
        raise DataError(
            f"{directory}: the draft breaks the serving contract:\n{listed}" + (f"\n  {more}" if more else "")
        )


def of_import(found: Finding) -> Finding:
    """The mistake with advice that does not ask for another export or training."""
    return evolve(found, advice=REIMPORT) if found.code == OF_MAKER else found
