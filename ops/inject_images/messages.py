"""The chat messages of an ingested sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LINE_BREAKS = "\r\n"


def messages(row: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    """The chat messages of a valid ingested sample; adjacent texts are joined. policy: where images may stand."""
    keep_images = policy == "in-place"
    turns = [{**turn, "content": _joined(turn["content"], keep_images)} for turn in row["conversations"]]
    if row["images"] and not keep_images:
        first = next(turn for turn in turns if turn["role"] == "user")
        first["content"].insert(0, {"type": "image"})
    return turns


def _joined(parts: Iterable[dict[str, Any]], keep_images: bool) -> list[dict[str, Any]]:
    """The parts with adjacent texts joined; texts around a removed image are separated by one line break."""
    joined: list[dict[str, Any]] = []
    is_removed = False  # whether an image after the last part was removed
    for part in parts:
        if part["type"] == "image" and not keep_images:
            is_removed = True
            continue
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            before, after = joined[-1]["text"], part["text"]
            text = f"{before.rstrip(LINE_BREAKS)}\n{after.lstrip(LINE_BREAKS)}" if is_removed else before + after
            joined[-1] = {**part, "text": text}
        else:
            joined.append(part)
        is_removed = False
    return joined
