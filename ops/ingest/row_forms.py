"""Rows whose turns are no list yet, as rows that have one: the forms of tool data that differ in their columns.

FORMS is the table: how a row of a form is recognised, and the function that gives a row of turns and tools.

    xLAM, APIGen    `query`, `answers` and `tools`, the latter two JSON: the user's turn, and an answer of calls. The
                    parameters of its tools are no schema: {"city": {"type": "str, optional", "default": "Paris"}}
    turns as JSON   `messages` or `conversations` in a text, such as Nemotron's; also with Python's quotes, as pandas
                    writes a list to CSV
    Nemotron        older: `input`, a list of turns, with `output`, perhaps with `system_prompt`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import frozen

from ops.ingest.row_values import CALL_ROLES, is_none, parsed
from ops.ingest.rows import ANSWERS, TURNS
from ops.ingest.tools import Tool, literal, with_tools

Row = dict[str, Any]


@frozen
class Form:
    """A form of rows: how one is recognised, and the row of turns that it is, with the mistake in it."""

    name: str
    recognised: Callable[[Row], bool]
    read: Callable[[Row], tuple[Row, str]]


def form_of(row: Row) -> Form | None:
    return next((form for form in FORMS if form.recognised(row)), None)


def in_turns(row: Row) -> tuple[Row, str]:
    """A row of any form with its turns and tools as lists, and the mistake in it, "" for none."""
    form = form_of(row)
    row, mistake = (row, "") if form is None else form.read(row)
    return (row, mistake) if mistake else with_tools(row)


def _has_no_turns(row: Row) -> bool:
    return all(is_none(row.get(key)) for key in (*TURNS, *ANSWERS))


def _is_xlam(row: Row) -> bool:
    return {"query", "answers", "tools"} <= row.keys() and isinstance(row["query"], str) and _has_no_turns(row)


def _xlam(row: Row) -> tuple[Row, str]:
    others, mistake = with_tools({key: value for key, value in row.items() if key not in ("query", "answers")})
    turns: list[Row] = [{"role": "user", "content": row["query"]}]
    if not is_none(row["answers"]):
        turns.append({"role": CALL_ROLES[0], "content": row["answers"]})
    tools = {"tools": [_with_schema(tool) for tool in others["tools"]]} if "tools" in others else {}
    return {**others, "messages": turns, **tools}, mistake


TYPES = {name: name for name in ("string", "integer", "number", "boolean", "array", "object")} | {
    "str": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("list", "tuple", "set"), "array"),
}
WORD = re.compile(r"[A-Za-z]+")


def _with_schema(tool: Tool) -> Tool:
    """A tool whose parameters are a schema. xLAM's types are Python's, such as `List[int], optional`."""
    parameters: Any = tool.get("parameters")
    values = parameters.values() if isinstance(parameters, dict) else [None]
    if not all(isinstance(value, dict) and isinstance(value.get("type"), str) for value in values):
        return tool
    properties = {name: {**value, "type": _type(value["type"])} for name, value in parameters.items()}
    required = [name for name, value in parameters.items() if "default" not in value]
    return {
        **tool,
        "parameters": {"type": "object", "properties": properties, **({"required": required} if required else {})},
    }


def _type(name: str) -> str:
    """JSON's name of a type by its first word; an unknown one is a string."""
    word = WORD.match(name.strip())
    first = word[0].lower() if word else ""
    return TYPES.get(first, "string")


def _turns_key(row: Row) -> str | None:
    return next((key for key in TURNS if row.get(key) is not None), None)


def _is_json_of_turns(row: Row) -> bool:
    value = row.get(_turns_key(row) or "")
    return isinstance(value, str) and value.lstrip().startswith("[")


def _json_of_turns(row: Row) -> tuple[Row, str]:
    key = str(_turns_key(row))
    try:
        return {**row, key: parsed(row[key])}, ""
    except ValueError as error:
        turns = literal(row[key])
        return ({**row, key: turns}, "") if turns else (row, f'"{key}" must be a list of turns, or its JSON: {error}')


def _is_input_of_turns(row: Row) -> bool:
    return isinstance(row.get("input"), list) and isinstance(row.get("output"), str) and _has_no_turns(row)


def _input_of_turns(row: Row) -> tuple[Row, str]:
    others = {key: value for key, value in row.items() if key not in ("input", "output", "system_prompt")}
    answer = [{"role": "assistant", "content": row["output"]}] if row["output"] else []
    system = {"system": row["system_prompt"]} if row.get("system_prompt") and not row.get("system") else {}
    return {**others, **system, "messages": [*row["input"], *answer]}, ""


FORMS = (
    Form("xLAM, APIGen", _is_xlam, _xlam),
    Form("turns as JSON", _is_json_of_turns, _json_of_turns),
    Form("Nemotron, input and output", _is_input_of_turns, _input_of_turns),
)
