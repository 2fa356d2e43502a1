"""The values of rows: what counts as missing, by which names keys go, and what can be written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

TURN_TEXTS = ("content", "text", "value")
REASONING = ("reasoning_content", "reasoning", "thinking")  # of an answer
LEARNING = ("weight", "loss", "train", "training", "loss_weight")  # of an answer: whether it is learnt, 0 or 1
PART_KINDS = ("text", "image", "image_url", "video", "video_url", "audio", "input_audio")
IMAGE_KINDS = ("image", "image_url", "input_image", "computer_screenshot")
CALL_ROLES = ("function_call", "tool_call")  # a turn that is a call, or several
RESULT_ROLES = ("tool", "function", "observation", "tool_response", "ipython")
RESULT_PART, CALL_PART = "tool_result", "tool_use"  # of Anthropic
DEEPEST = 100  # levels of tools, arguments and results
NO_VALUE_OF_JSON, TOO_DEEP = "no value of JSON", f"nested in more than {DEEPEST} levels"
INVALID_TEXT = "half a surrogate pair"
INVALID = "invalid text"  # why a sample with such a text is dropped


def is_none(value: Any) -> bool:
    """Whether a value is missing: null, or an object or list of only such, as tables write missing values."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, (dict, list)):
            values.extend(value.values() if isinstance(value, dict) else value)
        elif value is not None:
            return False
    return True


def first_value(mapping: dict[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of the names that is present and not null."""
    for name in names:
        if (value := mapping.get(name)) is not None:
            return value
    return None


def is_valid_text(text: str) -> bool:
    """Whether a text can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def turn_role(turn: dict[str, Any]) -> Any:
    """The name of a turn's role."""
    return first_value(turn, ("role", "from"))


def part_kind(part: dict[str, Any]) -> str:
    """The type of a content part, inferred from its only key if not given; or an empty string."""
    kind = part.get("type")
    if isinstance(kind, str):
        return kind
    return next((key for key in PART_KINDS if not is_none(part.get(key))), "")


def part_image(part: dict[str, Any]) -> Any:
    """The image in a content part, or None.

    Anthropic has it in a `source`, the Model Context Protocol as base64 in `data`.
    """
    source, is_image = part.get("source"), part_kind(part) in IMAGE_KINDS
    held = source if is_image and isinstance(source, dict) and not is_none(source) else part
    for name in ("base64", "data") if is_image else ("base64",):
        if held.get(name) is not None:
            return {"base64": held[name]}
    return next((held[name] for name in ("image", "image_url", "url", "path") if not is_none(held.get(name))), None)


def content_parts(turn: dict[str, Any]) -> list[Any]:
    """The parts of a turn's content; none of a text, and of a call or result that is other JSON.

    A result is parts if each names its kind, or if one is an image.
    """
    content = first_value(turn, TURN_TEXTS)
    role = turn_role(turn)
    if role in RESULT_ROLES and isinstance(content, dict) and _shows_image(content):
        return [content]
    if not isinstance(content, list) or role in CALL_ROLES:
        return []
    is_parts = role not in RESULT_ROLES or all(map(_names_its_kind, content))
    return content if is_parts or any(map(_shows_image, content)) else []


def _names_its_kind(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in (*PART_KINDS, "input_text", *IMAGE_KINDS)


def _shows_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_KINDS and part_image(part) is not None


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN, infinities and a text that is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is {NO_VALUE_OF_JSON}")


def json_fault(value: Any) -> str:
    """Why a value cannot be written as JSON that is read again everywhere, or an empty string."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += [*each, *each.values()]
            elif isinstance(each, list):
                inner += each
            elif fault := _fault_of_leaf(each):
                return fault
        if not inner:
            return ""
        level = inner
    return TOO_DEEP


def _fault_of_leaf(value: Any) -> str:
    if isinstance(value, str):
        return "" if is_valid_text(value) else INVALID_TEXT
    is_right = isinstance(value, (int, type(None))) or (isinstance(value, float) and math.isfinite(value))
    return "" if is_right else NO_VALUE_OF_JSON
