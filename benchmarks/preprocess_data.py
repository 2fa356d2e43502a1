"""Conversations for benchmarks/preprocess.py: real prose of the standard library, the same each time. No torch."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from PIL import Image

WORDS = " ".join(topics[name] for name in sorted(topics)).split()
EMOJI_EVERY = 30  # words per emoji: one or two in a short answer
CHINESE = (
    "\u8fd9\u662f\u4e00\u53ea\u732b\uff0c\u5b83\u5728\u770b\u4e66\u3002"
    "\u8bed\u8a00\u53c2\u8003\u624b\u518c\u8bf4\u660e\u4e86\u8bed\u6cd5\u3001\u8bed\u4e49\u548c\u4f8b\u5b50\u3002"
    "\u6211\u4eec\u53ef\u4ee5\u7528\u5b83\u6765\u5b66\u4e60\uff0c\u4e5f\u53ef\u4ee5\u7528\u5b83\u6765\u67e5\u627e\u3002"
)


def conversation(index: int, words: int, kind: str = "text") -> tuple[str, str]:
    """A question and an answer of `words` words of prose, from a different place for each index.

    kind: "emoji" adds some emoji; "chinese" gives as many Chinese characters, with some emoji.
    """
    first = index * 37 % (len(WORDS) - words)
    if kind == "chinese":
        start = index % len(CHINESE)
        answer = (CHINESE[start:] + CHINESE * (words // len(CHINESE) + 1))[:words]
        return f"{CHINESE[:12]}{index}", "\U0001f600".join(answer[at : at + 60] for at in range(0, words, 60))
    if kind == "emoji":
        shown = WORDS[first : first + words]
        answer = " \U0001f600 ".join(" ".join(shown[at : at + EMOJI_EVERY]) for at in range(0, words, EMOJI_EVERY))
        return f"What about {WORDS[first]}? \U0001f914", answer
    return f"What does the language reference say about {WORDS[first]}?", " ".join(WORDS[first : first + words])


def write_jsonl(file: Path, samples: int, words: int) -> None:
    """Write a data set in which every tenth sample has an image of its own."""
    with file.open("w", encoding="utf-8") as lines:
        for index in range(samples):
            question, answer = conversation(index, words)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            row: dict[str, object] = {"id": f"sample-{index}", "messages": turns}
            if index % 10 == 0:
                row["image"] = {"base64": base64.b64encode(image(index, "PNG", (32, 32))).decode("ascii")}
            lines.write(json.dumps(row) + "\n")


def image(index: int, file_format: str, size: tuple[int, int]) -> bytes:
    """An encoded image with a smooth gradient of colours, different for each index."""
    small = np.random.default_rng(index).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(file, format=file_format, quality=90)
    return file.getvalue()
