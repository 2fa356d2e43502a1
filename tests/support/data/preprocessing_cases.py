"""Conversations with images of every kind that a server prepares as `tokenize_chat` does, but for a turned photo."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from family_checkpoints import PROSE, picture
from PIL import Image

from ops.artifacts import ImageSamples
from ops.lib.data.image_packs import PackWriter


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def conversation(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages from (question, answer) in turn; an "@" in a question stands for an image."""
    messages = []
    for question, answer in turns:
        parts: list[dict[str, Any]] = []
        for place, text in enumerate(question.split("@")):
            parts += [{"type": "image"}] * (place > 0) + [{"type": "text", "text": text}] * bool(text)
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


ONE = conversation(("@What is it?", "There are three of them."))
TURNED = Image.Exif()
TURNED[0x0112] = 6  # orientation: to be turned by 90 degrees

# Name -> messages, images. The processor of the checkpoints takes images of 256 to 4096 pixels in steps of 8.
Cases = Mapping[str, tuple[list[dict[str, Any]], list[bytes]]]
CASES: Cases = {
    "png": (ONE, [encoded(picture(50, 30))]),
    "jpeg": (ONE, [encoded(picture(50, 30), "JPEG", quality=90)]),
    "rgba": (ONE, [encoded(picture(51, 37).convert("RGBA"))]),
    "40x40": (ONE, [encoded(picture(40, 40))]),
    "no resize": (ONE, [encoded(picture(64, 32))]),
    "too large": (ONE, [encoded(picture(200, 120))]),
    "too small": (ONE, [encoded(picture(9, 11))]),
    "two images": (
        conversation(("@And now@count.", "Two are small.")),
        [encoded(picture(50, 30)), encoded(picture(30, 50))],
    ),
    "two side by side": (conversation(("@@Count.", "Two.")), [encoded(picture(50, 30)), encoded(picture(64, 32))]),
    "turns": (
        conversation(("@What is it?", "It is blue."), ("And @ that?", "It is red."), ("Count.", "There are two.")),
        [encoded(picture(50, 30)), encoded(picture(24, 40))],
    ),
    "text": (conversation(("What is it?", "It is blue."), ("Count.", "There are two.")), []),
    "turned": (ONE, [encoded(picture(50, 30), "JPEG", quality=90, exif=TURNED)]),
}
TEXTS: Cases = {
    "text": CASES["text"],
    "longer": (conversation((PROSE[1], PROSE[2]), (PROSE[0], "And now, what is it?")), []),
}
SAME = [name for name in CASES if name != "turned"]


def write_cases(folder: Path, cases: Cases = CASES) -> ImageSamples:
    """Write the cases as the artifact that inject_images would write."""
    packs = PackWriter(folder)
    rows = [
        {
            "id": name,
            "split": "train",
            "category": "image" if images else "text",
            "messages": messages,
            "images": [packs.add(image) for image in images],
        }
        for name, (messages, images) in cases.items()
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ImageSamples(folder, "d")
