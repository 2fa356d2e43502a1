"""Rows of other columns than those of ops/ingest/rows.py, by the table `columns` of the config.

The first row of a file must have all of them, or none: then the file is read as it is. A later row may lack one, as
JSON leaves out what is null, if it is whole without it. Of the row's own texts only those stay that belong to the
mapped ones: a "prompt" does beside a mapped "completion", and "messages" do not.
"""

from __future__ import annotations

from typing import Any

from dsl.errors import shortened
from ops.ingest.op import Columns
from ops.ingest.row_forms import form_of, in_turns
from ops.ingest.row_values import REASONING
from ops.ingest.rows import ANSWERS, INPUTS, KEYS, TURNS, turns_mistake
from ops.ingest.traffic import exchange, is_arrival

FAMILIES = (
    frozenset(TURNS),
    *(frozenset((key, *answers, *(INPUTS if key == "instruction" else ()))) for key, answers in ANSWERS.items()),
)
TEXTS = frozenset().union(*FAMILIES)
FILE_NAMES = ("file_name", "image_file_name", "file_names", "image_file_names")  # of images, in metadata beside them
IMAGES = ("image", "images", *FILE_NAMES)
OWN = (*KEYS, *REASONING)  # columns that mean something where `columns` does not name them
LISTED = 12  # columns that a message names
Row = dict[str, Any]


def applies(columns: Columns, row: Any) -> bool:
    """Whether a file with this first row has the columns: it has one, or is in no form without them."""
    if not isinstance(row, dict):
        return True
    return any(column in row for column in columns.given.values()) or not is_readable(row)


def is_readable(row: Row) -> bool:
    """Whether a row has turns without any mapping, or is a server's."""
    if is_arrival(row) or exchange(row) is not None:
        return True
    turned, mistake = in_turns(row)
    return not (mistake or turns_mistake(turned))


def mapped(row: Row, columns: Columns, question: str, *, is_first: bool) -> tuple[Row, str]:
    """The row with its columns under the keys that they are mapped to, and the mistake in it, "" for none.

    question: of a mapped answer without a question, about the image of its row.
    """
    given = columns.given
    texts = TEXTS & given.keys()
    kept = frozenset[str]().union(*(family for family in FAMILIES if family & texts)) if texts else TEXTS
    others = {
        key: value
        for key, value in row.items()
        if not (key in given or (key in OWN and key in given.values()) or (key in TEXTS and key not in kept))
        and not (key == "images" and "image" in given)
        and not (key in REASONING and "reasoning" in given)
    }
    made = {**others, **{key: row[column] for key, column in given.items() if column in row}}
    if "answer" in given and "question" not in {*given, *made}:
        if asked := [key for key in ("prompt", "instruction") if row.get(key) and key not in given.values()]:
            return (
                row,
                f'columns has "answer" without "question", and the row has "{asked[0]}": name that for one of them, '
                f'question = "{asked[0]}"',
            )
        if not any(key in made for key in IMAGES):
            return row, (
                'columns has "answer" without "question", and no column has images that one question for all could be '
                f'about: name the column of the questions, question = "..."; the row has {_listed(row)}'
            )
        made["question"] = question
    missing = {key: column for key, column in given.items() if column not in row}
    if missing and (is_first or (form_of(made) is None and turns_mistake(made))):
        return row, _missing(row, missing)
    return made, ""


def _missing(row: Row, missing: dict[str, str]) -> str:
    lacking = ", ".join(f'no column "{shortened(column)}" for "{key}"' for key, column in missing.items())
    fixed = '; one question for all is `question = "..."` of the node itself' if "question" in missing else ""
    remedy = "correct it, or write null where a row has none"
    return f"columns: {lacking}; the row has {_listed(row)}; {remedy}{fixed}"


def _listed(row: Row) -> str:
    own = [str(name) for name in row if name]
    return shortened(", ".join(own[:LISTED]) + (f", and {len(own) - LISTED} more" if len(own) > LISTED else ""))
