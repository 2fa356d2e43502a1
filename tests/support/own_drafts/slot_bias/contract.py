"""Its tensors. No engine serves it, so nothing is known of wrong fields. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING: Mapping[str, str] = {}
WRONG: Mapping[str, str] = {}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Its tensors beside a config.json, with their shapes."""
    return {"slot_bias.table": (config["vocab_size"], config["block_size"] - 1)}
