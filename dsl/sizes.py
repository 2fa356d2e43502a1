"""Amounts of bytes, as people write and read them."""

from __future__ import annotations

import re

from dsl.errors import ConfigError, shortened

POWERS_OF_TEN = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
POWERS_OF_TWO = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS = POWERS_OF_TEN | POWERS_OF_TWO
SIZE = r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)"


def parsed_bytes(text: str) -> int:
    """The number of bytes in a size such as `24 GiB`, `1.5 TB` or `512MB`.

    KiB to TiB are powers of two, KB to TB powers of ten. Raises ConfigError for any other text, and for less than a
    byte.
    """
    found = re.fullmatch(SIZE, text.strip())
    if found is None or found[2].lower() not in UNITS:
        raise ConfigError(f'expected a number of bytes such as "24 GiB" or "24 GB", got "{shortened(text)}"')
    from fractions import Fraction

    size = int(Fraction(found[1]) * UNITS[found[2].lower()])
    if size < 1:
        raise ConfigError(f'expected at least one byte, got "{text}"')
    return size


def shown_bytes(size: float) -> str:
    """A number of bytes as text: `36.4 GB`, `2.7 MB`, `12,345 bytes`, `1,204.0 TB`; powers of ten, as disks
    are sold.
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    if size < 100_000:
        return f"{size:,.0f} bytes"
    return f"{size / 1e6:.2g} MB" if size < 1e8 else f"{size / 1e6:.0f} MB"
