"""What the user ran himself, `trusted` in his state folder: SHA-256 of a text and what it is, a line each.

A record that came from somebody else may name the same things; only what is listed here is used as the user's own.
"""

from __future__ import annotations

import hashlib

from dsl.errors import StoreError
from executor.system.jsonlines import append_line, read_lines
from executor.system.user_cache import user_state

FILE = "trusted"
TRACKING_URI = "tracking URI"


def trust(what: str, text: str) -> None:
    """Remember a text; does nothing where the state folder cannot be written."""
    folder = user_state()
    if folder is not None and not is_trusted(what, text):
        try:
            append_line(folder / FILE, {"what": what, "sha256": _sha256(text)}, durable=True)
        except StoreError:  # a full disk
            return


def is_trusted(what: str, text: str) -> bool:
    folder = user_state()
    lines = read_lines(folder / FILE) if folder is not None else []
    return any((line.get("what"), line.get("sha256")) == (what, _sha256(text)) for line in lines)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
