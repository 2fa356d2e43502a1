"""The chat messages of an ingested sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LINE_BREAKS = "\r\n"


def messages(row: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    """Chat messages of an ingested sample without fault; no two texts stand side by side."""
    keep_images = policy == "in-place"
    turns = [{**turn, "content": _joined(turn["content"], keep_images)} for turn in row["conversations"]]
    if row["images"] and not keep_images:
        first = next(turn for turn in turns if turn["role"] == "user")
        first["content"].insert(0, {"type": "image"})
    return turns


def _joined(parts: Iterable[dict[str, Any]], keep_images: bool) -> list[dict[str, Any]]:
    """Neighbouring texts as one; where an image leaves from between two texts, one line break parts them."""
    joined: list[dict[str, Any]] = []
    left = False  # whether an image stood behind the last part
    for part in parts:
        if part["type"] == "image" and not keep_images:
            left = True
            continue
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            before, behind = joined[-1]["text"], part["text"]
            text = f"{before.rstrip(LINE_BREAKS)}\n{behind.lstrip(LINE_BREAKS)}" if left else before + behind
            joined[-1] = {**part, "text": text}
        else:
            joined.append(part)
        left = False
    return joined
