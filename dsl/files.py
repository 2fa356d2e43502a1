"""Files of dflow's own: opened without following links, and replaced as a whole.

A kill at any moment leaves the old content or the new one; durable ones survive a crash of the machine too.
A link where dflow writes is removed, never written through; executor/system/symlinks.py has those of a store.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from dsl.os_errors import clear_errors

MODE = 0o644
LARGEST = 256 << 20  # bytes of a file that is read whole: dflow writes none so large
NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EFBIG})  # none of dflow's in its place


def open_plain(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError, with ELOOP for a link and for special files.

    It waits for no pipe, and reads no device.
    """
    return os.fdopen(_plain_descriptor(path)[0], "rb")


def read_plain(path: Path) -> bytes:
    """Read a regular file. Raises OSError as `open_plain` does, and with EFBIG for more than LARGEST bytes."""
    descriptor, size = _plain_descriptor(path)
    data = b""
    try:
        while size <= LARGEST and (piece := os.read(descriptor, size + 1)):
            data += piece
            size = max(size, len(data))
    finally:
        os.close(descriptor)
    if size > LARGEST:
        raise OSError(errno.EFBIG, f"larger than {LARGEST >> 20} MiB", str(path))
    return data


def _plain_descriptor(path: Path) -> tuple[int, int]:
    """Open a regular file that is no link; returns its descriptor and its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return descriptor, status.st_size


def open_own(path: Path, flags: int) -> int:
    """Open a file of dflow's own; returns its descriptor. A link in its place is removed first. Raises OSError."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, MODE)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
    remove_link(path)
    return os.open(path, flags | os.O_NOFOLLOW, MODE)


def appended(path: Path) -> IO[bytes]:
    """A file of dflow opened for appending, created where it is missing; see `open_own`."""
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def new_file(path: Path) -> IO[bytes]:
    """A new file that replaces whatever was there: a link is removed, not written through. Raises OSError."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def remove_link(path: Path) -> None:
    """Remove a symbolic link. Any other file or folder stays, even one that takes the link's place meanwhile."""
    if path.is_symlink():
        with suppress(FileNotFoundError, IsADirectoryError):
            path.unlink()


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace a file as a whole: readers see the old one or the new one. Raises StoreError or DiskFull."""
    with clear_errors(path):
        write_whole(path, data, durable=durable)


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace a file as `replace_file` does. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    try:
        with new_file(fresh) as file:
            file.write(data)
        if durable:
            sync(fresh)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
