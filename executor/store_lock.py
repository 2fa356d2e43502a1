"""One lock for the whole store: who takes artifacts into use holds it shared, who removes some holds it alone.

<store>/gc.lock     flock. Shared while a run decides that it takes an artifact, until that stands in its record, and while
                    an artifact is placed and entered into the index: moments only. Exclusive while `dflow gc` looks
                    what is in use and takes the rest out of its place. So no run waits long, and nothing goes that a
                    run counts on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "gc.lock"


@contextmanager
def artifacts_taken(store: Path) -> Iterator[None]:
    """No artifact is removed within; may be nested."""
    with _locked(store, fcntl.LOCK_SH):
        yield


@contextmanager
def nothing_taken(store: Path) -> Iterator[None]:
    """Nobody takes an artifact into use within, nor adds to the index."""
    with _locked(store, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(store: Path, kind: int) -> Iterator[None]:
    descriptor = os.open(store / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
