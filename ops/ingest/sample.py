"""Samples of every source, before they are split, packed and written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen
class ImagePart:
    """The place of an image within a turn."""


IMAGE = ImagePart()
THINK, END_OF_THOUGHT = "<think>", "</think>"  # special tokens of a few tokenizers, but part of the text


@frozen
class Turn:
    """One turn of a conversation: its texts, and IMAGE for each of the sample's images in order.

    reasoning_content   the assistant's reasoning before its answer, if the source separates the two
    """

    role: str
    content: tuple[str | ImagePart, ...]
    reasoning_content: str | None = None

    def row(self) -> dict[str, Any]:
        """The turn as a JSON object of samples.jsonl."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.content
        ]
        reasoning = {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        return {"role": self.role, "content": content, **reasoning}


@frozen
class RawSample:
    """A conversation that can be used as a sample.

    split   train, val or test; None: drawn by hash of draw_id, from train and the splits in `draw`
    turns   in order; their roles are system, user and assistant
    images  files, or the encoded images themselves: as many as the turns have places
    label   the correct answer, if the source has it separately
    topic   what the row's "category" says, if it says something
    """

    id: str
    split: str | None
    turns: tuple[Turn, ...]
    images: tuple[Path | bytes, ...] = ()
    draw: tuple[str, ...] = ("test", "val")
    draw_id: str | None = None
    label: str | None = None
    topic: str | None = None


@frozen
class DroppedSample:
    """A sample that cannot be used, and the reason. detail: specific to this sample."""

    id: str
    reason: str
    detail: str = ""


def with_leading_images(turns: Iterable[Turn], count: int) -> tuple[Turn, ...]:
    """The turns with `count` more image places at the start of the first user turn."""
    placed = list(turns)
    first = next(place for place, turn in enumerate(placed) if turn.role == "user")
    turn = placed[first]
    placed[first] = Turn(turn.role, (*(IMAGE,) * count, *turn.content), turn.reasoning_content)
    return tuple(placed)
