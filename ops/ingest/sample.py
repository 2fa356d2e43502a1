"""What every source of samples yields, before it is split, packed and written."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

ROLES = ("system", "user", "assistant")


@frozen
class RawSample:
    """A conversation that can be used.

    split   train, val or test, or None: to be drawn by hash
    turns   (role, text) in order; roles of ROLES
    images  files, or the encoded images themselves
    """

    id: str
    split: str | None
    turns: tuple[tuple[str, str], ...]
    images: tuple[Path | bytes, ...] = ()


@frozen
class DroppedSample:
    """A sample that cannot be used, and why."""

    id: str
    reason: str
