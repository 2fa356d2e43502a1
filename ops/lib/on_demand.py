"""Modules that import a heavy optional library at their top, imported when something of them is first used.

if TYPE_CHECKING:
    from ops.check_export import live            # what a reader, and the key of the node, follow
else:
    live = OnDemand("ops.check_export.live")     # what runs
"""

from __future__ import annotations

import importlib
from typing import Any


class OnDemand:
    """Stands for a module until one of its names is asked for; imports it then."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
