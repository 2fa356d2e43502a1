"""Rows of published benchmarks, in the form of their own files, as rows that `ingest` reads. Loads no torch.

    messages    "messages" and other forms of ingest, with "id" and "category"
    turns       "turns", texts that are asked one after the other, or "prompt" as a list of texts, or "messages" of
                the user only beside "question_id": MT-Bench, Spec-Bench, SPEED-Bench, MMSpec (its images are in
                images/), and files with nothing but "turns"
    humaneval   "task_id" and "prompt": HumanEval, MBPP
    gsm8k       "question", a text: GSM8K
    math        "problem": MATH-500
    bfcl        "question", a list, and "function": BFCL, which is refused, since its prompts come with tools

Where a row has no id, its line is the id, and the name of the file is the category of rows that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
