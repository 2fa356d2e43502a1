"""Image packs: many encoded images in few files, each distinct image stored once.

An image reference is {"sha256", "pack", "offset", "size"}, as ops/artifacts.py defines it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from dsl.errors import DataError
from ops.lib.data.files import artifact_file, link_or_copy, shown_json

PACK_BYTES = 256 * 1024 * 1024
MAX_IMAGE_BYTES = PACK_BYTES  # of an encoded image


class PackWriter:
    """Appends encoded images to images-00000.bin, images-00001.bin, ... in a folder."""

    def __init__(self, folder: Path, pack_bytes: int = PACK_BYTES) -> None:
        self.folder = folder
        self.pack_bytes = pack_bytes
        self._places: dict[bytes, tuple[int, int]] = {}  # digest -> pack, offset: small, there may be millions
        self._pack = 0
        self._offset = 0

    def add(self, encoded: bytes) -> dict[str, object]:
        """Store an encoded image, unless the same bytes are stored already, and return the reference to it."""
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


def read_packed(folder: Path, reference: Mapping[str, object]) -> bytes:
    """The encoded image to which a reference points.

    Raises DataError where its pack is not a file of the folder, or the bytes do not match the reference.
    """
    pack = artifact_file(folder, reference["pack"])
    offset, size = reference["offset"], reference["size"]
    if not (isinstance(offset, int) and isinstance(size, int) and offset >= 0 and 0 <= size <= MAX_IMAGE_BYTES):
        place = f"{shown_json(offset)}+{shown_json(size)}"
        raise DataError(f"{pack}: {place} is no place of an image of up to {MAX_IMAGE_BYTES} bytes; verify the store")
    with pack.open("rb") as file:
        file.seek(offset)
        encoded = file.read(size)
    if len(encoded) != size:
        raise DataError(f"{pack}: ends before image {reference['sha256']} at {offset}+{size}; verify the store")
    if hashlib.sha256(encoded).hexdigest() != reference["sha256"]:
        raise DataError(f"{pack}: at {offset}+{size} is another image than {reference['sha256']}; verify the store")
    return encoded


def link_packs(folder: Path, target: Path) -> None:
    """Hard-link or copy the image packs of a folder into another folder."""
    for pack in sorted(folder.glob("images-*.bin")):
        link_or_copy(artifact_file(folder, pack.name), target / pack.name)
