"""Errors that say that memory is lacking: a fact about the machine, and never one about a target that is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What torch says in a plain RuntimeError: of a CPU's memory, and of a GPU's where a library or the driver asked for it.
SAID = re.compile(r"can't allocate memory|out of memory|bad_alloc|_ALLOC_FAILED")


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory is lacking."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and SAID.search(str(error)) is not None


@contextmanager
def no_verdict(what: str) -> Iterator[None]:
    """Opens a context in which a lack of memory is a MemoryError that says what was measured, and what to do.

    what: COPY or WEIGHTS of ops/lib/target/probed.py.
    """
    try:
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise MemoryError(
            f"out of memory while measuring {what} of the target, which is no verdict on the target: free memory of "
            "this machine, or set launch.memory of the node so that no other runs beside it, and run it again "
            f"({str(error).partition(chr(10))[0] or type(error).__name__})"
        ) from error
