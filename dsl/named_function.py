"""Imports by name, "module:function": run functions, the table of ops, what a `chosen_code` names; not hooks."""

from __future__ import annotations

import importlib
from typing import Any


def named_function(place: str) -> Any:
    """What "module:function" names; callers declare its type. Raises ImportError or AttributeError, as imports do."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
