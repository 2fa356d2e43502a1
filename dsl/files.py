"""Files of dflow's own, opened without following links and replaced as a whole; JSON and JSON lines in them; and errors
of the file system in one line: where, why, and what to do.

A kill at any moment leaves the old content or the new one; durable ones survive a crash of the machine too.
A link where dflow writes is removed, never written through; executor/system/symlinks.py has those of a store.
A link, a folder, a pipe or a device in the place of a file is not read: it counts as a damaged file.

Lines are one write() to a file opened with O_APPEND, so that several processes can write to one file. The next writer
ends a line that a killed process left incomplete, and readers skip it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import attrs

from dsl.errors import DflowError, DiskFull, StoreError
from dsl.shown import shown_bytes

NO_SPACE = 74  # the exit code of a stage that could not write why it failed
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Libraries not written in Python raise errors of their own, which quote the operating system's message.
FULL_MESSAGES = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
REFUSED = {
    errno.EROFS: "its file system is read-only; choose another --store (or DFLOW_STORE)",
    errno.EACCES: "this user has no permission; change that, or choose another --store (or DFLOW_STORE)",
    errno.EPERM: "this user has no permission; change that, or choose another --store (or DFLOW_STORE)",
    errno.ELOOP: "symbolic links form a loop there, or there is a link where dflow follows none",
    errno.ENOENT: "its folder is gone; was it removed while a run used it?",
}
# Errors that a user can fix, wherever they occur.
USER_ERRNOS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Open a context that turns an OSError from writing at this path into DiskFull or StoreError."""
    try:
        yield
    except OSError as error:
        raise clear_error(error, path) from error


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Open a context that turns an OSError about a user's file outside the store into a DflowError."""
    if path.is_dir():
        raise DflowError(f"{path}: is a folder; give a file")
    try:
        yield
    except OSError as error:
        no_folder = f"there is no folder {path.parent}; create it, or give another file"
        why = no_folder if error.errno == errno.ENOENT else error.strerror or str(error)
        raise DflowError(f"{path}: cannot be written: {why}") from error


def clear_error(error: OSError, path: Path) -> StoreError:
    """The StoreError, or DiskFull, that stands for an OSError at a path."""
    if error.errno in FULL:
        return DiskFull(full_at(path))
    return StoreError(f"{path}: cannot be used: {REFUSED.get(error.errno or 0, error.strerror or str(error))}")


def full_at(path: Path) -> str:
    """The message that the disk at a path is full."""
    return (
        f"disk full at {path} ({shown_bytes(free_bytes(path))} left): free space there, for example by `dflow gc`, "
        "or choose another --store; then `dflow resume`"
    )


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of causes, means that a disk is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in FULL):
            return True
        if any(words in str(error) for words in FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, or of its nearest existing parent; 0 where that cannot be read."""
    here = folder.absolute()
    for place in (here, *here.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return 0


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


LONGEST_LINE = 64 << 20  # bytes


def append_line(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append a value to a file as one line of JSON. durable: return only when it is on disk."""
    append_lines(path, [value], durable=durable)


def append_lines(path: Path, values: Iterable[Mapping[str, Any]], *, durable: bool = False) -> None:
    """Append values to a file as lines of JSON, in one write."""
    line = b"".join(compact(value) for value in values)
    with clear_errors(path):
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):  # a second write might not follow the first
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if durable:  # also for an existing file: its creator may have died before this
            sync(path.parent)


def compact(value: Any) -> bytes:
    """A value as one line of JSON with a line end, in UTF-8; a lone surrogate is escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace") + b"\n"


def known_fields(cls: type[attrs.AttrsInstance], data: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a JSON object that are fields of the class; others, as of a newer dflow, are left out."""
    names = _field_names(cls)
    return {name: value for name, value in data.items() if name in names}


@cache
def _field_names(cls: type[attrs.AttrsInstance]) -> frozenset[str]:
    return frozenset(attrs.fields_dict(cls))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The values of all complete lines of a JSONL file; empty where it does not exist."""
    return LineReader(path).read()


class LineReader:
    """A reader of JSON lines: each call returns those appended since the last one, at first from an offset on.

    A last line without its end is read later. A line of more than LONGEST_LINE bytes is skipped as damaged. only: lines
    without this text are skipped unparsed.
    """

    def __init__(self, path: Path, offset: int = 0, *, only: re.Pattern[bytes] | None = None) -> None:
        self._path = path
        self._offset = offset
        self._only = only
        self._is_skipping = False

    def read(self) -> list[dict[str, Any]]:
        values = []
        try:
            with open_plain(self._path) as file:
                file.seek(self._offset)
                while line := file.readline(LONGEST_LINE):
                    has_end = line.endswith(b"\n")
                    if not has_end and len(line) < LONGEST_LINE:
                        break
                    self._offset += len(line)
                    is_wanted = has_end and not self._is_skipping and (self._only is None or self._only.search(line))
                    if is_wanted and (value := parsed_object(line)) is not None:
                        values.append(value)
                    self._is_skipping = not has_end
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            return []
        return values


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON text. Raises JSONDecodeError, also for one nested too deeply, and UnicodeDecodeError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def parsed_object(text: bytes | str) -> dict[str, Any] | None:
    """The object in a JSON text; None where it holds something else, or is no JSON."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any, *, durable: bool = False, in_one_line: bool = False) -> None:
    """Replace a JSON file atomically. durable: so that it survives a crash of the machine.

    in_one_line: for large values that people seldom read; several times faster to write and read.
    """
    indented = json.dumps(value, indent=1, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    replace_file(path, compact(value) if in_one_line else indented, durable=durable)


def read_json_or_none(path: Path) -> Any:
    """Read a JSON file; None where it does not exist. Raises ValueError for invalid JSON and for what is no
    plain file.
    """
    try:
        return parse_json(read_plain(path).decode())
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EFBIG):
            raise ValueError("not a plain file" if error.errno == errno.ELOOP else error.strerror) from None
        if error.errno not in NO_FILE:
            raise
        return None


def read_object_or_none(path: Path) -> dict[str, Any] | None:
    """Read the object in a JSON file; None where the file is missing, damaged, or holds anything else."""
    try:
        value = read_json_or_none(path)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_there(path: Path, kind: Callable[[Path], bool] = Path.exists) -> bool:
    """Whether the path exists; False also for a name too long for the file system or a folder without permission."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def store_above(path: Path) -> Path | None:
    """The store in which a path lies, after following links; None outside of stores."""
    for folder in Path(os.path.realpath(path)).parents:
        if (folder / "format").is_file() and (folder / "objects").is_dir():
            return folder
    return None
