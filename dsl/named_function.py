"""Imports by name, "module:name": run functions, the table of ops, commands, what a `chosen_code` names; not hooks."""

from __future__ import annotations

import importlib
from typing import Any


def named_function(place: str) -> Any:
    """What "module:name" names. Raises ImportError or AttributeError, as imports do.

    It keeps a module out of a process that does not need it, and its code out of keys: `dsl/closure.py` does not
    follow names that are constants or computed. It returns Any because mypy does not follow them either, so every
    caller declares the type of what it gets.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
