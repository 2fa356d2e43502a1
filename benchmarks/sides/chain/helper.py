"""The function that every node of a chain calls: the one that is edited to see who notices."""

from __future__ import annotations


def joined(text: str, value: str) -> str:
    # A comment that may be edited.
    return f"{text}{value.strip()}\n"
