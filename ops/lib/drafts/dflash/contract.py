"""Plain DFlash has no tensors and no fields beside the backbone's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING: Mapping[str, str] = {}
WRONG: Mapping[str, str] = {}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Its tensors beside a config.json, with their shapes."""
    return {}
