"""Conversations with images in the results of tools, and a template that shows them as Qwen3-VL's does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rows import TOOLS, Message, calls, conversation, say
from agent_templates import REWRITES, STRIPS, TEMPLATES, chat_calls, with_parts
from chat_samples import png, write_samples
from chat_templates import TOOLS as QWEN3_VL

from ops.artifacts import ImageSamples
from ops.lib.data.files import json_line
from ops.lib.data.image_packs import PackWriter

SHOWING = {"qwen3-vl": QWEN3_VL, "strips": with_parts(STRIPS), "rewrites": with_parts(REWRITES)}
WRITES = {"qwen3-vl": lambda answer: chat_calls(answer) + "<|im_end|>"} | {
    name: lambda answer, name=name: TEMPLATES[name].writes(answer, None) for name in ("strips", "rewrites")
}


def shown(role: str, *parts: str | None) -> Message:
    """A message of texts, and of images where a part is None."""
    return {
        "role": role,
        "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
    }


SUNNY, RAINY = say("assistant", "Sunny."), say("assistant", "Rain, sadly.")
SEEN = {
    "one": conversation(say("user", "Look at Paris."), calls("Paris"), shown("tool", None), SUNNY),
    "chain": conversation(
        shown("user", "This is the map: ", None, " Look at Paris."),
        calls("Paris"),
        shown("tool", "The page: ", None, " and its end."),
        calls("Rome"),
        shown("tool", None, None),
        SUNNY,
        shown("user", "And here?", None),
        RAINY,
    ),
    "parallel": conversation(
        say("user", "Look at both."), calls("Paris", "Rome"), shown("tool", None, "clear"), shown("tool", "wet"), SUNNY
    ),
    "text": conversation(say("user", "Look at Paris."), calls("Paris"), shown("tool", "clear"), SUNNY),
}


def images_of(messages: Sequence[Message], start: int = 0) -> list[bytes]:
    """An image for each place, of a size of its own."""
    places = sum(part["type"] == "image" for message in messages for part in message["content"])
    return [png(16 + 8 * ((start + place) % 6), 24) for place in range(places)]


def write_seen(
    folder: Path, conversations: Mapping[str, Sequence[Message]] = SEEN, split: str = "train", **more: Any
) -> ImageSamples:
    """The artifact of inject_images with these conversations, each with TOOLS."""
    samples, lines = write_samples(folder, []), []
    packs = PackWriter(folder)
    for name, messages in conversations.items():
        images = [packs.add(image) for image in images_of(messages)]
        category = "image" if images else "text"
        line = {"id": name, "split": split, "category": category, "messages": messages, "images": images}
        lines.append(line | {"tools": TOOLS} | more)
    (folder / "samples.jsonl").write_text("".join(map(json_line, lines)), encoding="utf-8")
    return samples
