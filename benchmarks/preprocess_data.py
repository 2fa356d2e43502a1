"""Conversations for benchmarks/preprocess.py: real prose of the standard library, the same each time. No torch."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from pydoc_data.topics import topics

WORDS = " ".join(topics[name] for name in sorted(topics)).split()


def conversation(index: int, words: int) -> tuple[str, str]:
    """A question, and an answer of so many words out of the prose, from another place for each index."""
    first = index * 37 % (len(WORDS) - words)
    return f"What does the language reference say about {WORDS[first]}?", " ".join(WORDS[first : first + words])


def write_jsonl(file: Path, samples: int, words: int) -> None:
    """A data set in which every tenth sample has a picture of its own."""
    with file.open("w", encoding="utf-8") as lines:
        for index in range(samples):
            question, answer = conversation(index, words)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            row: dict[str, object] = {"id": f"sample-{index}", "messages": turns}
            if index % 10 == 0:
                row["image"] = {"base64": base64.b64encode(_png(index)).decode("ascii")}
            lines.write(json.dumps(row) + "\n")


def _png(index: int) -> bytes:
    """A grey picture of 32 x 32 with the index in its pixels."""
    pixels = b"".join(b"\0" + bytes((row * column + index) % 256 for column in range(32)) for row in range(32))
    header = struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels + index.to_bytes(4, "big"))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
