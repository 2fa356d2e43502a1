"""Rows of published benchmarks, in the form of their own files, as rows that `ingest` reads. Loads no torch.

    messages    "messages" and other forms of ingest, with "id" and "category"
    turns       "turns", texts that are asked one after the other, or "prompt" as a list of texts, or "messages" of
                the user only beside "question_id": MT-Bench, Spec-Bench, SPEED-Bench, MMSpec (its images are in
                images/), and files with nothing but "turns"
    humaneval   "task_id" and "prompt": HumanEval, MBPP
    gsm8k       "question", a text: GSM8K
    math        "problem": MATH-500
    bfcl        "question", a list of turns of messages, with the tools in "function", or "involved_classes", whose
                functions are in files of the folder multi_turn_func_doc/: BFCL. The first turn only, as no tool runs

Where a row has no id, its line is the id, and the name of the file is the category of rows that have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from attrs import frozen

from ops.ingest.image_values import path_named
from ops.ingest.records import Record
from ops.ingest.row_values import first_value, turn_role
from ops.lib.data.json_lines import json_kind

IDS = ("question_id", "id", "prompt_id", "task_id", "unique_id")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # the beginning of the texts that SPEED-Bench leaves out
UNPREPARED = "a placeholder of SPEED-Bench, not its prompt: make the file with the benchmark's own prepare_data.py"
TEXTS = {"humaneval": "prompt", "gsm8k": "question", "math": "problem"}  # form -> the key of its only text
CLASSES = {  # of BFCL's rows of several turns, and the files of their functions
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
    "WebSearchAPI": "web_search",
}
FUNCTIONS = "multi_turn_func_doc"
# The words around a bare question in z-lab's benchmark of DFlash: dflash/benchmark.py.
REASONING = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
Z_LAB = {"gsm8k": REASONING, "math": REASONING, "humaneval": SOLUTION}


@frozen
class SetRow:
    """A row that `ingest` reads, with "id" and "category". later: the texts that are asked after it, in order."""

    row: Any
    later: tuple[str, ...] = ()


def form_of(row: Any) -> str:
    """The form of a file by its first row."""
    if not isinstance(row, dict):
        return "messages"
    if isinstance(row.get("question"), list) or "involved_classes" in row:
        return "bfcl"
    prompt = row.get("prompt")
    is_list = isinstance(prompt, list) and bool(prompt) and all(isinstance(text, str) for text in prompt)
    if "turns" in row or is_list or ("messages" in row and "id" not in row and "question_id" in row):
        return "turns"
    if first_value(row, ("messages", "conversations")) is not None:
        return "messages"
    if "task_id" in row and "prompt" in row:
        return "humaneval"
    return next((form for form in ("gsm8k", "math") if TEXTS[form] in row), "messages")


def set_row(record: Record, form: str, category: str, *, by_z_lab: bool) -> SetRow | str:
    """The row of a record, or the mistake in it.

    category: of rows without one. by_z_lab: with the words that z-lab puts around a bare question.
    """
    row = record.row
    if form == "messages":
        return SetRow(row)
    if not isinstance(row, dict):
        return f"expected an object, got {json_kind(row)}"
    if form == "bfcl":
        return _with_tools(row, record, category)
    turns = _turns(row) if form == "turns" else _text(row, TEXTS[form])
    if isinstance(turns, str):
        return turns
    if any(text.startswith(PLACEHOLDER) for text in turns):
        return UNPREPARED
    if by_z_lab and form in Z_LAB and (form != "humaneval" or "entry_point" in row):
        turns = [Z_LAB[form].format(text) for text in turns]
    own = first_value(row, ("topic", "category")) if form == "turns" else None
    made = {
        "id": record.number if (named := first_value(row, IDS)) is None else named,
        "category": category if own is None else own,
        "messages": [*_system(row), {"role": "user", "content": turns[0]}],
    }
    images = {key: row[key] for key in ("image", "images") if row.get(key)}
    if "topic" in row:
        images = {key: _in_images(value) for key, value in images.items()}
    return SetRow(made | images, tuple(turns[1:]))


def _with_tools(row: Mapping[str, Any], record: Record, category: str) -> SetRow | str:
    """The first turn of a row of BFCL, with its tools, or the mistake in it."""
    question = row.get("question")
    first = question[0] if isinstance(question, list) and question else None
    messages = question if isinstance(first, dict) else first
    if not isinstance(messages, list) or not messages:
        return '"question" must be a list of turns, each a list of messages'
    try:
        tools = _tools(row, record.folder)
    except ValueError as mistake:
        return str(mistake)
    named = first_value(dict(row), IDS)
    return SetRow(
        {"id": record.number if named is None else named, "category": category, "messages": messages, "tools": tools}
    )


def _tools(row: Mapping[str, Any], folder: Path) -> list[Any]:
    """The tools of a row of BFCL in its first turn. Raises ValueError with the mistake in them.

    Without those that it excludes, and those that a later turn brings.
    """
    if row.get("function") is not None:
        return row["function"] if isinstance(row["function"], list) else [row["function"]]
    functions = [each for file in function_files(row, folder) for each in _functions(file, file.stat().st_mtime_ns)]
    later = row.get("missed_function")
    left_out = {*_names(row.get("excluded_function")), *_names(list(later.values()) if isinstance(later, dict) else [])}
    return [function for function in functions if function.get("name") not in left_out]


def _names(value: Any) -> Iterator[str]:
    """The texts in a list, or in lists of it."""
    for each in value if isinstance(value, list) else []:
        yield from _names(each) if isinstance(each, list) else [str(each)]


def function_files(row: Any, folder: Path) -> list[Path]:
    """The files with the functions of a row of BFCL; none of other rows. Raises ValueError for one that is missing."""
    classes = row.get("involved_classes") if isinstance(row, dict) else None
    if not isinstance(classes, list):
        return []
    if unknown := [str(name) for name in classes if name not in CLASSES]:
        raise ValueError(
            f"the functions of {', '.join(unknown)} of BFCL depend on more than its files: leave the row out"
        )
    files = [folder / FUNCTIONS / f"{CLASSES[name]}.json" for name in classes]
    if absent := [file for file in files if not file.is_file()]:
        raise ValueError(f"{absent[0]}: no such file; copy BFCL's folder {FUNCTIONS} beside the benchmark's file")
    return files


@lru_cache(maxsize=len(CLASSES))
def _functions(file: Path, _changed: int) -> list[Any]:
    """The functions in a file, one a line. Raises ValueError. _changed: when, so that it is read again."""
    try:
        return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def _text(row: Mapping[str, Any], key: str) -> list[str] | str:
    """The only text of a row in a list, or the mistake in it."""
    text = row.get(key)
    return [text] if isinstance(text, str) and text.strip() else f'"{key}" must be a text, got {json_kind(text)}'


def _turns(row: Mapping[str, Any]) -> list[str] | str:
    """The texts that a row asks in order, or the mistake in them."""
    key = next((key for key in ("turns", "prompt", "messages") if row.get(key) is not None), "turns")
    turns = row.get(key)
    wanted = f'"{key}" must be a list of texts of the user'
    if not isinstance(turns, list) or not turns:
        return f"{wanted}, got {json_kind(turns) if turns != [] else 'an empty list'}"
    asked = [turn for turn in turns if not _is_system(turn)]
    texts = [turn.get("content") if isinstance(turn, dict) and turn_role(turn) == "user" else turn for turn in asked]
    for place, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            return f"{wanted}, got {json_kind(text) if text != '' else 'an empty one'} in place {place + 1}"
    return [str(text) for text in texts] or f"{wanted}, and has none"


def _system(row: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The system turn of a row of turns, if it has one."""
    turns = row.get("messages")
    return [turn for turn in turns[:1] if _is_system(turn)] if isinstance(turns, list) else []


def _is_system(turn: Any) -> bool:
    return isinstance(turn, dict) and turn_role(turn) == "system"


def _in_images(value: Any) -> Any:
    """An image of MMSpec: a bare name is that of a file in images/."""
    name = path_named(value)
    return f"images/{name}" if name is not None and "/" not in name else value
