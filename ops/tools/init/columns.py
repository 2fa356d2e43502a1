"""Which columns of a user's data hold images, questions and answers, where they have no name that `ingest` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from dsl.errors import DataError, shortened
from ops.ingest.columns import is_readable, mapped
from ops.ingest.op import Columns
from ops.ingest.records import captioned, csv_rows
from ops.ingest.row_values import REASONING, first_value, is_none, parsed
from ops.ingest.rows import ANSWERS as READ_ANSWERS
from ops.ingest.rows import TURNS as READ_TURNS
from ops.ingest.rows import is_image
from ops.ingest.source import Part, parts_of
from ops.ingest.tools import literal

ROWS = 20  # that are looked at, of each file
MOST_FILES = 50
# Words in the names of columns, the likeliest first.
QUESTIONS = ("question", "query", "prompt", "instruction", "problem", "request", "user", "human", "input", "ask")
ANSWERS = (
    *("answer", "answers", "response", "reply", "completion", "output", "caption", "captions", "description", "text"),
    *("solution", "summary", "assistant", "gpt", "target", "report", "translation", "transcription"),
)
THOUGHTS = ("thought", "thoughts", "cot", "chain_of_thought")  # beside REASONING, which ingest reads itself
NAMED_THUS = "a text, named like reasoning"
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
KEYS = tuple(each.name for each in fields(Columns))
ASK = "name those that there are: dflow init DATA --column question=NAME --column answer=NAME --column image=NAME"
OF_LOGS = ("messages", "choices")  # keys of a request and of a response
LOG_KEYS = (
    'a server\'s log: rename the keys to "request" and "response" (also request_body and response_body, input and '
    'output, or "messages" with "response" or "choices"): docs/data.md#traffic-of-a-server'
)
Row = dict[str, Any]


@frozen
class Proposal:
    """Columns for a pipeline, and why: of each key what its column is."""

    columns: Columns
    why: str


def named_columns(given: list[str]) -> Proposal | None:
    """The columns that the user names, each as KEY=NAME; None for none. Raises DataError for other texts."""
    pairs = [text.partition("=") for text in given]
    for text, (key, _, name) in zip(given, pairs, strict=True):
        if key not in KEYS or not name:
            raise DataError(f"--column {text}: write KEY=NAME, where KEY is one of {', '.join(KEYS)}")
    named = {key: name for key, _, name in pairs}
    return Proposal(Columns(**named), "as --column says") if named else None


def proposed_columns(sources: tuple[Path, ...], forms: tuple[str, ...], allow_outside: bool) -> Proposal | None:
    """The columns of rows that `ingest` does not read as they are, or of their reasoning; None if it reads both, or
    their turns are wrong.

    Raises DataError where it cannot be told which columns they are, or where files need different ones.
    """
    found: dict[Columns, tuple[str, Proposal]] = {}
    beside: dict[Columns, tuple[str, Proposal]] = {}  # of rows that are read but for their reasoning
    for source, form in zip(sources, forms, strict=True):
        if form not in ("json", "csv", "parquet"):
            continue
        for part in islice(parts_of(source, form, allow_outside=allow_outside), MOST_FILES):
            rows = list(islice(_rows(part, form), ROWS))
            if rows and not any(map(_is_read, rows)):
                proposal = _proposal(part.place, rows)
                found.setdefault(proposal.columns, (part.place, proposal))
            elif thought := _unread_thought(rows):
                why = f"ingest reads these rows without this column; {_why({'reasoning': (thought, NAMED_THUS)})}"
                beside.setdefault(Columns(reasoning=thought), (part.place, Proposal(Columns(reasoning=thought), why)))
    found = found or beside
    if len(found) > 1:
        (one, _), (other, _), *_ = found.values()
        raise DataError(
            f"{one} and {other} need different columns: rename those of one, or make a pipeline of each: `columns` of "
            "ingest is one table for all sources"
        )
    return next((proposal for _, proposal in found.values()), None)


def _rows(part: Part, form: str) -> Iterator[Row]:
    if form == "csv":
        return csv_rows(Path(part.place))
    return (record.row for record in part.raw() if isinstance(record.row, dict))


def _thought(rows: list[Row], names: tuple[str, ...]) -> str | None:
    """The column of the first row that has one of the names and holds texts."""
    named = (column for column in rows[0] if column.lower() in names)
    return next((column for column in named if _kind([row.get(column) for row in rows]) == TEXT), None)


def _unread_thought(rows: list[Row]) -> str | None:
    """The column of reasoning beside an answer, both texts, if only that of the answer is read."""
    if not rows or first_value(rows[0], READ_TURNS) is not None or _thought(rows, REASONING):
        return None
    texts = {column for column, value in rows[0].items() if isinstance(value, str)}
    is_answered = any(asked in texts and texts & set(answers) for asked, answers in READ_ANSWERS.items())
    return _thought(rows, THOUGHTS) if is_answered else None


def _why(found: dict[str, tuple[str, str]]) -> str:
    return ", ".join(f"{key} = {json.dumps(column, ensure_ascii=False)}: {of}" for key, (column, of) in found.items())


def _is_read(row: Row) -> bool:
    """Whether a row needs no columns: it is read, or would be but for a mistake in its turns."""
    captions, mistake = captioned(row, "?")
    has_turns = any(isinstance(row.get(key), list) for key in ("messages", "conversations"))
    return has_turns or (not mistake and is_readable(captions))


def _proposal(place: str, rows: list[Row]) -> Proposal:
    if logged := _logged(rows):
        listed = ", ".join(json.dumps(shortened(str(column)), ensure_ascii=False) for column in logged)
        raise DataError(f"{place}: {listed} {'are' if len(logged) > 1 else 'is'} of {LOG_KEYS}")
    kinds = {
        column: _kind([row.get(column) for row in rows]) for column in dict.fromkeys(key for row in rows for key in row)
    }
    found: dict[str, tuple[str, str]] = {}
    turns = [column for column, kind in kinds.items() if kind == TURNS]
    if len(turns) == 1:
        found["messages"] = turns[0], "lists of turns"
    else:
        texts = [column for column, kind in kinds.items() if kind == TEXT]
        thought = _thought(rows, (*REASONING, *THOUGHTS))
        rest = [column for column in texts if column != thought]
        if len(rest) < 2 and (IMAGE not in kinds.values() or not rest or _named(rest, QUESTIONS)):
            thought = None  # it is what is asked or answered
        texts = rest if thought else texts
        if asked := _named(texts, QUESTIONS):
            found["question"] = asked, "a text, named like a question"
        left = [column for column in texts if column != asked]
        if answer := _named(left, ANSWERS):
            found["answer"] = answer, "a text, named like an answer"
        elif len(left) == 1:
            found["answer"] = left[0], "the only other text" if asked else "the only text"
        elif asked and not left:
            found["prompt"] = found.pop("question")
        if thought:
            found["reasoning"] = thought, NAMED_THUS
    images = [column for column, kind in kinds.items() if kind == IMAGE]
    if "answer" in found and "question" not in found and not images:
        others = [column for column in texts if column != found["answer"][0]]
        if len(others) != 1:
            raise _unknown(place, kinds)
        found = {"question": (others[0], "the only other text"), **found}
    if images:
        named = _named(images, ("image", "picture", "photo", "path")) or images[0]
        found["image"] = named, "images"
    columns = Columns(**{key: column for key, (column, _) in found.items()})
    if not found.keys() & {"messages", "answer", "prompt"} or not is_readable(
        mapped(rows[0], columns, "?", is_first=False)[0]
    ):
        raise _unknown(place, kinds)
    return Proposal(columns, f"no column has a name that ingest reads; {_why(found)}")


def _logged(rows: list[Row]) -> list[str]:
    """The columns that hold requests or responses of a server, in keys that `ingest` does not read."""

    def is_of_log(value: Any) -> bool:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = parsed(value)
            except ValueError:
                return False
        return isinstance(value, dict) and any(isinstance(value.get(key), list) for key in OF_LOGS)

    return [column for column in dict.fromkeys(key for row in rows for key in row) if is_of_log(rows[0].get(column))]


def _unknown(place: str, kinds: dict[str, str]) -> DataError:
    listed = ", ".join(f"{shortened(str(column))} ({kind})" for column, kind in islice(kinds.items(), 12))
    return DataError(f"{place}: which columns are question and answer? It has {listed}; {ASK}")


TURNS, IMAGE, TEXT, OTHER = "turns", "images", "text", "other values"


def _kind(values: list[Any]) -> str:
    """What the values of a column are; those that are missing do not count."""
    given = [value for value in values if not is_none(value) and value != ""]
    if given and all(map(_are_turns, given)):
        return TURNS
    if given and all(all(map(is_image, value)) if isinstance(value, list) else is_image(value) for value in given):
        return IMAGE
    return TEXT if given and all(isinstance(value, str) and not _is_number(value) for value in given) else OTHER


def _are_turns(value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parsed(value)
        except ValueError:
            value = literal(value)
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _named(columns: list[str], names: tuple[str, ...]) -> str | None:
    """The column whose name is one of the names, or else has it as a word; by the order of names."""
    words = {column: [word.lower() for word in WORD.findall(column)] for column in columns}
    for is_match in (lambda name, column: [name] == words[column], lambda name, column: name in words[column]):
        for name in names:
            matching = [column for column in columns if is_match(name, column)]
            if matching:
                return matching[0]
    return None
