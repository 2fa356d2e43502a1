"""One lock for the whole store: shared by processes that start to use artifacts, exclusive for one that removes some.

<store>/gc.lock     flock. Shared while a run decides that it takes an artifact, until that stands in its record, and
                    while an artifact is placed and entered into the index: moments only. Exclusive while `dflow gc`
                    looks what is in use and takes the rest out of its place. So no run waits long, and nothing goes
                    that a run counts on.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from executor.system.os_errors import clear_errors
from executor.system.output import print_lines
from executor.system.symlinks import open_own

LOCK = "gc.lock"


class HasPath(Protocol):
    @property
    def path(self) -> Path: ...


S = TypeVar("S", bound=HasPath)
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def artifacts_taken(store: Path) -> Iterator[None]:
    """Within, no artifact is removed; may be nested."""
    with _locked(store, fcntl.LOCK_SH):
        yield


def while_nothing_goes(begin: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorates a function whose first argument is a store: no artifact is removed until it returns."""

    @functools.wraps(begin)
    def held(store: S, /, *arguments: P.args, **named: P.kwargs) -> T:
        with artifacts_taken(store.path):
            return begin(store, *arguments, **named)

    return held


@contextmanager
def nothing_taken(store: Path) -> Iterator[None]:
    """Within, no process starts to use an artifact or adds to the index. Prints a line if it has to wait."""
    with _locked(store, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(store: Path, kind: int) -> Iterator[None]:
    with clear_errors(store / LOCK):
        descriptor = open_own(store / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        _lock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        if kind == fcntl.LOCK_EX:  # a shared lock is waited for only briefly
            print_lines("waiting: a run reads what the store holds", error=True)
        fcntl.flock(descriptor, kind)
