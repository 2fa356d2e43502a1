"""What differs between two configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Path, value of one and value of the other, for every leaf of two JSON values that is not the same in both."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return [] if one == other else [(path, one, other)]
    found = []
    for key in sorted(one.keys() | other.keys()):
        found += differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    return found
