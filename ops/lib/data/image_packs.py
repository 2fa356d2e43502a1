"""Image packs: many encoded images in few files, each distinct image stored once.

An image reference is {"sha256", "pack", "offset", "size"}, as ops/artifacts.py defines it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dsl.errors import DataError

PACK_BYTES = 256 * 1024 * 1024


class PackWriter:
    """Appends encoded images to images-00000.bin, images-00001.bin, ... in a folder."""

    def __init__(self, folder: Path, pack_bytes: int = PACK_BYTES) -> None:
        self.folder = folder
        self.pack_bytes = pack_bytes
        self._places: dict[bytes, tuple[int, int]] = {}  # digest -> pack, offset: small, there may be millions
        self._pack = 0
        self._offset = 0

    def add(self, encoded: bytes) -> dict[str, object]:
        """The reference of an image; writes it unless the same bytes are already stored."""
        digest = hashlib.sha256(encoded).digest()
        if digest not in self._places:
            if self._offset and self._offset + len(encoded) > self.pack_bytes:
                self._pack, self._offset = self._pack + 1, 0
            with (self.folder / _pack_name(self._pack)).open("ab") as pack:
                pack.write(encoded)
            self._places[digest] = (self._pack, self._offset)
            self._offset += len(encoded)
        number, offset = self._places[digest]
        return {"sha256": digest.hex(), "pack": _pack_name(number), "offset": offset, "size": len(encoded)}


def _pack_name(number: int) -> str:
    return f"images-{number:05d}.bin"


def read_packed(folder: Path, reference: dict[str, object]) -> bytes:
    """The encoded image of a reference. Raises DataError if the pack is too short."""
    pack, offset, size = folder / str(reference["pack"]), int(str(reference["offset"])), int(str(reference["size"]))
    with pack.open("rb") as file:
        file.seek(offset)
        encoded = file.read(size)
    if len(encoded) != size:
        raise DataError(f"{pack}: ends before image {reference['sha256']} at {offset}+{size}; verify the store")
    return encoded
