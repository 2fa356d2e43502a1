"""Data files as bytes, unpacked where they are compressed with gzip (.gz) or Zstandard (.zst).

The suffix says so, or the first bytes of a file of another name. Python's own Zstandard comes with 3.14; pyarrow has
one, and is loaded for such a file only.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from attrs import frozen

from dsl.errors import DataError

GZIP, ZSTD = ".gz", ".zst"
MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD}
NAMES = {GZIP: "gzip", ZSTD: "Zstandard"}
BUFFER = 1 << 20
UNPACKED, TIMES = 1 << 30, 1000  # most bytes of what a small file unpacks to, and of a large one for each of its own


@frozen
class Data:
    """The bytes of a data file. file: unpacked. packed: as it is on disk, with `size` bytes."""

    file: BinaryIO
    packed: BinaryIO
    size: int

    @property
    def share(self) -> float:
        """The share of the file that was read, 0..1."""
        return min(self.packed.tell() / max(self.size, 1), 1.0)


def plain_name(file: Path) -> str:
    """The name of a file without the suffix of its compression."""
    return file.stem if file.suffix.lower() in NAMES else file.name


def data_suffix(file: Path) -> str:
    """The suffix of a file in lower case, without that of its compression."""
    return Path(plain_name(file)).suffix.lower()


def too_much(size: int, unpacked: int) -> bool:
    """Whether a file of `size` bytes unpacks to more than real data does."""
    return unpacked > UNPACKED + TIMES * size


@contextmanager
def open_data(file: Path) -> Iterator[Data]:
    """Open a data file, which ends with the context.

    Raises DataError, also while it is read, for a file that cannot be read or unpacked, or unpacks to too much.
    """
    packing = ""
    try:
        with file.open("rb") as packed:
            size = os.fstat(packed.fileno()).st_size
            packing = _packing(file, packed)
            unpacked = cast(BinaryIO, _Unpacked.buffered(file, packed, packing, size)) if packing else packed
            yield Data(unpacked, packed, size)
    except (OSError, EOFError, zlib.error) as error:
        if packing and getattr(error, "errno", None) is None:
            raise DataError(f"{file}: cannot be unpacked as {NAMES[packing]} ({error}); fetch it again") from error
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{file}: cannot be read ({why}); `source` must name a data file or folder") from error


def head_of(file: Path, size: int) -> bytes:
    """The first `size` bytes of a data file, unpacked. Raises DataError as `open_data`."""
    with open_data(file) as data:
        return data.file.read(size)


def _packing(file: Path, packed: io.BufferedReader) -> str:
    if file.suffix.lower() in NAMES:
        return file.suffix.lower()
    head = packed.peek(4)
    return next((packing for magic, packing in MAGIC.items() if head.startswith(magic)), "")


class _Unpacked(io.RawIOBase):
    """What a compressed file unpacks to, as far as it is not too much."""

    def __init__(self, file: Path, source: Any, size: int) -> None:
        super().__init__()
        self._file, self._source, self._size = file, source, size
        self._read = 0

    @classmethod
    def buffered(cls, file: Path, packed: BinaryIO, packing: str, size: int) -> io.BufferedReader:
        if packing == GZIP:
            return io.BufferedReader(cls(file, gzip.GzipFile(fileobj=packed), size), BUFFER)
        import pyarrow  # slow, and of no use to other files

        return io.BufferedReader(cls(file, pyarrow.CompressedInputStream(packed, "zstd"), size), BUFFER)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._source.read(len(buffer))
        self._read += len(piece)
        if too_much(self._size, self._read):
            raise DataError(
                f"{self._file}: {self._size} bytes unpack to {self._read} bytes so far, which is too much for real "
                "data; unpack it yourself if it is meant"
            )
        buffer[: len(piece)] = piece
        return len(piece)
