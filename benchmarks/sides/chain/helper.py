"""The function that every node of a chain calls: it is edited to see which tool notices."""

from __future__ import annotations


def joined(text: str, value: str) -> str:
    # A comment that may be edited.
    return f"{text}{value.strip()}\n"
