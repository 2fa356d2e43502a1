"""Samples of every source, before they are split, packed and written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import evolve, frozen


@frozen
class ImagePart:
    """The place of an image within a turn."""


IMAGE = ImagePart()
LAST = "last"  # "learnt" of a row of which only the last answer is learnt
CONVERSATION = "conversation"  # the key of the id of a conversation of which a row is a part
ASKING = ("user", "tool")  # roles of the turns that an answer follows
THINK, END_OF_THOUGHT = "<think>", "</think>"  # special tokens of a few tokenizers, but part of the text


@frozen
class ToolCall:
    """A call of a tool in an answer. arguments: values of JSON, with their keys in the order given."""

    id: str
    name: str
    arguments: dict[str, Any]

    def row(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@frozen
class Turn:
    """One turn of a conversation: its texts, and IMAGE for each of the sample's images in order.

    reasoning_content   the assistant's reasoning before its answer, if the source separates the two
    tool_calls          of an answer, behind its text
    tool_call_id, name  of a tool's result: the id of its call, and the function's name
    """

    role: str
    content: tuple[str | ImagePart, ...]
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def row(self) -> dict[str, Any]:
        """The turn as a JSON object of samples.jsonl."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.content
        ]
        others: dict[str, Any] = {
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.row() for call in self.tool_calls] or None,
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        given = {key: value for key, value in others.items() if value is not None}
        return {"role": self.role, "content": content, **given}


@frozen
class RawSample:
    """A conversation that can be used as a sample.

    split   train, val or test; None: drawn by hash of `drawn_by`, from train and the splits in `draw`
    turns   in order; their roles are system, user, assistant and tool
    images  files, or the encoded images themselves: as many as the turns have places
    label   the correct answer, if the source has it separately
    topic   what the row's "category" says, or the field that `group` of ingest names, if it says something
    tools   those that the assistant may call, in the form that chat templates take
    documents   that the answers stand on, in the form that chat templates take
    noted   what else the row has that is counted, such as what is left out, and why
    settings    of its own that are left out, and their values as JSON
    opening of a request to a server: a digest of the turns up to the user's first (`opening_of`); None for other rows
    lacks   of a request that is kept as a prompt: why it has no answer
    learns_last   whether only the last answer is learnt, as marks of the others say
    """

    id: str
    split: str | None
    turns: tuple[Turn, ...]
    images: tuple[Path | bytes, ...] = ()
    draw: tuple[str, ...] = ("test", "val")
    draw_id: str | None = None
    label: str | None = None
    topic: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, Any], ...] = ()
    noted: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    opening: str | None = None
    lacks: str = ""
    learns_last: bool = False

    @property
    def drawn_by(self) -> str:
        """What the split is drawn by: requests of one conversation have the same, other samples their ids."""
        return self.opening or self.draw_id or self.id


@frozen
class DroppedSample:
    """A sample that cannot be used, and the reason. detail: specific to this sample."""

    id: str
    reason: str
    detail: str = ""


def opening_of(sample: RawSample) -> str:
    """A digest of the turns up to the user's first, which all requests of one conversation have.

    Images count by their bytes, or the names of their files. Tools do not, since clients add some while they talk.
    """
    first = next((place for place, turn in enumerate(sample.turns) if turn.role == "user"), len(sample.turns))
    turns = sample.turns[: first + 1]
    count = sum(part is IMAGE for turn in turns for part in turn.content)
    digest = hashlib.sha256(json.dumps([turn.row() for turn in turns]).encode())
    for image in sample.images[:count]:
        digest.update(hashlib.sha256(image.name.encode() if isinstance(image, Path) else image).digest())
    return digest.hexdigest()


def with_leading_images(turns: Iterable[Turn], count: int) -> tuple[Turn, ...]:
    """The turns with `count` more image places at the start of the first user turn."""
    placed = list(turns)
    first = next(place for place, turn in enumerate(placed) if turn.role == "user")
    turn = placed[first]
    placed[first] = evolve(turn, content=(*(IMAGE,) * count, *turn.content))
    return tuple(placed)
