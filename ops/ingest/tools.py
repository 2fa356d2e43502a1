"""The tools of a row, in the one form: [{"type": "function", "function": {"name", "description", "parameters"}}].

    tools           a list, or its JSON; a tool may lack the wrapper, or have Anthropic's `input_schema`
    functions       OpenAI's older name
    tools_json      Nemotron's
    <tools>         in a system turn, as Hermes has them (ops/ingest/turn_forms.py)

Keys keep their order, since chat templates write them in it. The type "dict" of BFCL's schemas is "object".
"""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path
from typing import Any

from dsl.errors import DataError, on_one_line, shortened
from ops.ingest.row_values import INVALID, INVALID_TEXT, is_none, json_fault, parsed
from ops.lib.data.files import read_text, shown_json
from ops.lib.data.sample_account import Unusable

Tool = dict[str, Any]

TOOL_KEYS = ("tools", "functions", "tools_json")
NO_LIST, NO_NAME = '"tools" must be a list of tools, or its JSON', "a tool has no name"
NO_FUNCTION, NO_JSON = "a tool that is no function", "tools are not JSON"
API_KEYS = ("cache_control", "defer_loading")  # of Anthropic's tools, which no prompt shows
LONGEST_LITERAL = 1 << 20  # characters; Python's parser needs hundreds of bytes for each


def with_tools(row: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The row with its tools as a list of objects in `tools`, and the mistake in them, "" for none."""
    if not any(key in row for key in TOOL_KEYS):
        return row, ""
    given: Any = next((row[key] for key in TOOL_KEYS if not (is_none(row.get(key)) or row[key] == "")), [])
    found, mistake = _listed(given)
    others = {name: value for name, value in row.items() if name not in TOOL_KEYS}
    return ({**others, "tools": found} if found else others), mistake


def _listed(value: Any) -> tuple[list[Tool], str]:
    if isinstance(value, str):
        try:
            value = parsed(value)
        except ValueError:
            return [], NO_LIST
        if is_none(value):
            return [], ""
    if not isinstance(value, list):
        return [], NO_LIST
    tools = [tool for tool in value if not is_none(tool)]
    if not all(isinstance(tool, dict) for tool in tools):
        return [], NO_LIST
    return tools, "" if all(_is_named(tool) or not _is_function(tool) for tool in tools) else NO_NAME


def normal_tools(row: dict[str, Any]) -> tuple[Tool, ...]:
    """The tools of a row behind `with_tools`. Raises Unusable for one that is no function, and for values that JSON
    lacks.
    """
    tools = row.get("tools")
    if not tools:
        return ()
    if fault := json_fault(list(tools)):
        raise Unusable(INVALID, "tools") if fault == INVALID_TEXT else Unusable(NO_JSON, fault)
    return tuple(map(_normal, tools))


def default_tools(file: Path) -> tuple[Tool, ...]:
    """The tools in a file of JSON. Raises DataError."""
    try:
        row, mistake = with_tools({"tools": read_text(file)})
        tools = normal_tools(row)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: default_tools cannot be read: {error}") from error
    except Unusable as fault:
        raise DataError(f"{file}: default_tools: {fault.reason}: {fault.detail}") from fault
    if mistake or not tools:
        raise DataError(f"{file}: default_tools: {mistake or 'has no tools'}")
    return tools


def chosen_tool(row: dict[str, Any]) -> str | None:
    """The function that a request's `tool_choice` names, "" where it is "none"; None for other choices, such as "auto".

    {"type": "none"} and {"type": "tool", "name"} are Anthropic's.
    """
    choice = row.get("tool_choice")
    if not isinstance(choice, dict):
        return "" if choice == "none" else None
    return "" if choice.get("type") == "none" else tool_name(choice) or None


def tool_name(tool: Tool) -> Any:
    """The name of a tool's function; None for none."""
    function = tool.get("function")
    return (function if isinstance(function, dict) else tool).get("name")


def tools_in(text: str) -> list[Tool]:
    """The tools between <tools> tags: a list, or objects one after the other; empty where there are none."""
    for body in (piece.partition("</tools>")[0] for piece in text.split("<tools>")[1:]):
        found, mistake = _listed(_values_in(body))
        if found and not mistake:
            return found
    return []


def _values_in(text: str) -> list[Any]:
    """The JSON values that stand one after the other in a text, lists as their members; or Python's literal."""
    values: list[Any] = []
    decoder, place = json.JSONDecoder(), 0
    try:
        while rest := text[place:].lstrip(" \t\r\n,"):
            value, end = decoder.raw_decode(rest)
            values += value if isinstance(value, list) else [value]
            place = len(text) - len(rest) + end
    except (ValueError, RecursionError):
        value = literal(text.strip())
        return value if isinstance(value, list) else [value]
    return values


def literal(text: str) -> Any:
    """The value of a text with Python's quotes, as `str` writes it; None if it is none."""
    if len(text) > LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a backslash that escapes nothing
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _is_function(tool: Tool) -> bool:
    """Whether a tool is a function, not one that a provider runs, such as a web search."""
    kind = tool.get("type")
    if isinstance(tool.get("function"), dict) or kind is None:
        return True
    return kind == "function" or any(isinstance(tool.get(key), dict) for key in ("parameters", "input_schema"))


def _is_named(tool: Tool) -> bool:
    name = tool_name(tool)
    return isinstance(name, str) and bool(name.strip())


def _normal(tool: Tool) -> Tool:
    if not _is_function(tool):
        raise Unusable(NO_FUNCTION, quoted(tool["type"]))
    if isinstance(tool.get("function"), dict):
        typed = tool if "type" in tool else {"type": "function", **tool}
        return {**typed, "type": "function", "function": _with_schema(tool["function"])}
    bare = {key: value for key, value in tool.items() if key not in ("type", *API_KEYS)}
    return {"type": "function", "function": _with_schema(bare)}


def _with_schema(function: dict[str, Any]) -> dict[str, Any]:
    """A function with its schema in `parameters`."""
    named = {
        "parameters" if key == "input_schema" and "parameters" not in function else key: value
        for key, value in function.items()
    }
    return {key: _schema(value) if key == "parameters" else value for key, value in named.items()}


def _schema(value: Any) -> Any:
    """A JSON schema, or a list of them, whose objects are called so; only places of schemas are read."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _within(key, inner) for key, inner in value.items()}


OF_SCHEMAS = ("items", "prefixItems", "additionalProperties", "not", "anyOf", "oneOf", "allOf")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")


def _within(key: str, value: Any) -> Any:
    if key == "type":
        return [_type(each) for each in value] if isinstance(value, list) else _type(value)
    if key in BY_NAME and isinstance(value, dict):
        return {name: _schema(each) for name, each in value.items()}
    return _schema(value) if key in OF_SCHEMAS else value


def quoted(value: Any) -> str:
    """A name in a message, in double quotes; other values as JSON."""
    return f'"{shortened(on_one_line(value))}"' if isinstance(value, str) else shown_json(value)


def _type(name: Any) -> Any:
    return "object" if name == "dict" else name
