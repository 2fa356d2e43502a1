"""Prompts for a served draft: held-out samples of its run as chat messages."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ops.lib.data.files import read_jsonl
from ops.lib.data.image_packs import read_packed

HELD_OUT = ("test", "val", "train")  # splits of the prompt to try: the first of these that has one


@frozen
class ChatPrompt:
    """A sample's id, and its turns before the first answer as chat messages for a server."""

    id: str
    messages: Sequence[Mapping[str, Any]]


HELLO = ChatPrompt(
    "no held-out sample", [{"role": "user", "content": [{"type": "text", "text": "Hello! Who are you?"}]}]
)


def held_out_prompts(samples: Path, vision: bool, count: int) -> tuple[ChatPrompt, ...]:
    """The first `count` prompts of an ImageSamples folder; vision: only those with images, else only those without."""
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in HELD_OUT}
    for row in read_jsonl(samples / "samples.jsonl"):
        fits = bool(row["images"]) == vision and any(turn["role"] == "user" for turn in row["messages"])
        if fits and len(rows[row["split"]]) < count:
            rows[row["split"]].append(row)
        if len(rows[HELD_OUT[0]]) == count:
            break
    chosen = next(filter(None, rows.values()), [])
    return tuple(ChatPrompt(str(row["id"]), chat_messages(row, samples)) for row in chosen)


def chat_messages(row: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The turns of a sample before its first answer, as chat messages with the images as data URLs."""
    images = iter(row["images"])
    messages = []
    for turn in row["messages"]:
        if turn["role"] == "assistant":
            break
        parts = [
            {"type": "image_url", "image_url": {"url": _data_url(folder, next(images))}}
            if part["type"] == "image"
            else {"type": "text", "text": part["text"]}
            for part in turn["content"]
        ]
        messages.append({"role": turn["role"], "content": parts})
    return messages


def _data_url(folder: Path, image: Mapping[str, Any]) -> str:
    """The data URL of an image reference of ops/artifacts.py; SGLang recognises the format by the bytes."""
    return "data:image/png;base64," + base64.b64encode(read_packed(folder, dict(image))).decode()


def prompt_text(prompt: ChatPrompt) -> str:
    parts: list[Any] = [part for message in prompt.messages for part in message["content"]]
    images = sum(part["type"] == "image_url" for part in parts)
    text = " ".join(part["text"].strip() for part in parts if part["type"] == "text")
    return f"{text} ({prompt.id}{f', {images} image(s)' if images else ''})"
