"""Imports by name, "module:name": run functions, the table of ops, commands, what a `chosen_code` names; not hooks."""

from __future__ import annotations

import importlib
from typing import Any


def named_function(place: str) -> Any:
    """The object named "module:name". Raises ImportError or AttributeError.

    Importing by name keeps a module out of processes that do not need it, and its code out of cache keys:
    `dsl/closure.py` does not follow such names. mypy does not either, so every caller declares the type.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
