"""How ops read and write files: JSON with sorted keys, atomic writes, links instead of copies, and the files that a
stranger's JSON names.
"""

from __future__ import annotations

import json
import os
import reprlib
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.files import parse_json, replace_file
from ops.lib.data.json_lines import bounded_lines, json_kind, parse_line, what_is_broken

OF_CHECKPOINTS = (
    *("*config.json", "tokenizer*.json", "vocab.json", "special_tokens*.json", "added_tokens*.json"),
    *("chat_template*.json", "*.index.json"),
)
TEXTS_OF_CHECKPOINTS = ("chat_template*", "additional_chat_templates/*", "merges*", "vocab*", "tokenizer.model")
LONGEST_ROW = 256 << 20  # bytes of a line of an artifact; `ingest` takes no sample of more than 64 Mi characters
TOO_LONG = f"longer than {LONGEST_ROW >> 20} MiB"
LARGEST_JSON = (
    48 << 20
)  # bytes of a JSON file; the largest tokenizers have 33 MiB, and objects need up to 24 times that
DEEPEST = 50  # levels of these files, which have about five


def write_json(path: Path, data: object) -> None:
    """Write indented UTF-8 JSON with sorted keys, atomically.

    Raises ValueError for NaN and infinities, which JSON lacks: use None for a missing number.
    """
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    replace_file(path, (text + "\n").encode(), durable=True)


def shown_json(value: Any) -> str:
    """A value as short text for a message; the value may be large, or nested too deeply for `repr`."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)


def read_text(path: Path) -> str:
    """The text of a file. Raises FileNotFoundError, UnicodeDecodeError, and DataError as `check_size`."""
    check_size(path)
    with path.open("rb") as file:
        return file.read(LARGEST_JSON).decode("utf-8")


def check_size(path: Path) -> None:
    """Check that a file is a regular one with at most LARGEST_JSON bytes, without reading it. Raises DataError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is no regular file; replace it by one")
    if status.st_size > LARGEST_JSON:
        raise DataError(
            f"{path}: {status.st_size:,} bytes, more than {LARGEST_JSON:,}; replace it by the original file"
        )


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises as `read_text` and `parse_json`."""
    return parse_json(read_text(path))


def artifact_file(folder: Path, name: object) -> Path:
    """The path of a file of an artifact, from a name in the artifact's JSON. All such names must pass this function.

    Raises DataError unless it is the plain name of a regular file in the folder. The artifact may come from somebody
    else, and could name a private file or an endless device.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise DataError(f"{folder}: {shown_json(name)} is no plain name of a file of this artifact; verify the store")
    path = folder / name
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; verify the store") from None
    if not is_regular:
        raise DataError(f"{path}: is no regular file but a link, a folder or a device; verify the store")
    return path


def read_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises FileNotFoundError, and DataError with line and column for anything else."""
    try:
        value = read_json(path)
    except (FileNotFoundError, DataError):
        raise
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {what_is_broken(error)}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:  # also an integer of thousands of digits
        raise DataError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object but {json_kind(value)}")
    return value


def check_json_files(folder: Path) -> None:
    """Check a checkpoint's text and JSON files before libraries read them. Raises DataError.

    It refuses files that are too large or not regular, and JSON files that hold no object or are nested too deeply.
    """
    for path in sorted({path for pattern in TEXTS_OF_CHECKPOINTS for path in folder.glob(pattern)}):
        if path.exists():  # a broken link is as good as none
            check_size(path)
    for path in sorted({path for pattern in OF_CHECKPOINTS for path in folder.glob(pattern)}):
        level: list[Any] = [read_object(path)]
        for _ in range(DEEPEST):
            children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
            level = [child for child in children if isinstance(child, (dict, list))]
        if level:
            raise DataError(f"{path}: nested too deeply, in more than {DEEPEST} levels")


ORDERED = frozenset({"tools", "documents"})  # of a sample: templates write their keys in the order given


def json_line(value: object) -> str:
    """The value as a line of a JSONL file, with its newline. Keys are sorted, but for samples with ORDERED ones.

    Raises ValueError as `write_json` does.
    """
    is_ordered = isinstance(value, dict) and not ORDERED.isdisjoint(value)
    return json.dumps(value, sort_keys=not is_ordered, ensure_ascii=False, allow_nan=False) + "\n"


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Write rows to a JSONL file: one compact JSON object, as `json_line` gives it, in each line."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(map(json_line, rows))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of an artifact's JSONL file. Only a newline ends a line, not Unicode's other separators.

    Raises DataError, with the line, for anything else: the artifact may come from somebody else.
    """
    for number, line in bounded_lines(path, LONGEST_ROW):
        row, mistake = parse_line(line.removesuffix(b"\n")) if len(line) <= LONGEST_ROW else (None, TOO_LONG)
        if not isinstance(row, dict):
            mistake = mistake or f"not a JSON object but {json_kind(row)}"
            raise DataError(f"{path}:{number}: {mistake}; verify the store")
        yield row


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if the file system has no links. For files that are never changed again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
