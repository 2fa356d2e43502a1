"""JSON files that one process writes for another, whose digest travels another way.

Whoever can write to a shared store can replace files there, and so would decide what code a stage runs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dsl.errors import StoreError
from dsl.files import NO_FILE, read_plain, replace_file
from dsl.json_files import compact, parse_json


def write_sealed(path: Path, value: Any) -> str:
    """Write a value in one line; returns the SHA-256 of the file."""
    data = compact(value)
    replace_file(path, data)
    return hashlib.sha256(data).hexdigest()


def read_sealed(path: Path, digest: str) -> Any:
    """Read a JSON file, and check its digest; None where it does not exist. Raises StoreError for another digest."""
    try:
        data = read_plain(path)
    except OSError as error:
        if error.errno not in NO_FILE:
            raise
        return None
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(
            f"{path}: somebody else has changed it since dflow wrote it; let only people whom you trust write to this "
            "store, and repeat the command"
        )
    return parse_json(data.decode())
