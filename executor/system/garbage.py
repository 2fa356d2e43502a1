"""Searches for garbage in cycles, which find nothing while libraries are imported and take a fifth of that time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Open a context without garbage collection; objects that exist at its end are exempt for good, such as modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
