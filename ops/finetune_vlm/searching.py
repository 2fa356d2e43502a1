"""One search of a regular expression, in the process of ops/lib/data/limited_process.py: it may backtrack for ever."""

from __future__ import annotations

import re


def search(pattern: str, text: str) -> str | None:
    """The pattern's group at its first match, None without one."""
    found = re.search(pattern, text)
    return found.group(1) if found else None
