"""Samples with the same turns and images, which may be in several splits under ids of their own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ops.lib.data.files import json_line
from ops.lib.data.sample_account import SPLITS

TRAINED = "train"
HELD_OUT = tuple(split for split in SPLITS if split != TRAINED)


def content_of(row: dict[str, Any]) -> bytes:
    """16 bytes that depend on the turns and the images of a line of samples.jsonl, and on nothing else."""
    images = [image["sha256"] for image in row["images"]]
    return hashlib.blake2b(json_line([row["conversations"], images]).encode(), digest_size=16).digest()


class Contents:
    """The contents of all samples so far, by split."""

    def __init__(self) -> None:
        self._trained: set[bytes] = set()
        self._held_out: dict[str, Counter[bytes]] = {split: Counter() for split in HELD_OUT}

    def __contains__(self, content: bytes) -> bool:
        return content in self._trained or any(content in counts for counts in self._held_out.values())

    def add(self, content: bytes, split: str) -> None:
        if split == TRAINED:
            self._trained.add(content)
        else:
            self._held_out[split][content] += 1

    def warnings(self) -> Iterator[str]:
        """One for each split with samples that are trained on as well."""
        for split, counts in self._held_out.items():
            same = sum(count for content, count in counts.items() if content in self._trained)
            if same:
                yield (
                    f"{same} of {counts.total()} samples of {split} have the same turns and images as a sample of "
                    f"{TRAINED}: what is measured on them, such as tau, is not that of unseen prompts; "
                    'duplicates = "drop" keeps the first of identical samples'
                )
