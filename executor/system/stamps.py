"""What tells cheaply that a file is as it was: size, times and inode, as the file system keeps them.

ctime is the kernel's own and moves with every write, so that an edit which puts mtime back is seen as well. Clocks have
a grain, though: two edits of the same size within it leave the same stamp. So what is learnt of a file that changed a
moment ago, or in the future by a clock that jumped, must not be remembered under its stamp.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

SETTLED_AFTER_NS = 2_000_000_000  # FAT keeps times by two seconds, the coarsest grain in use


@frozen
class Stamp:
    """A file's size in bytes, times in nanoseconds since 1970, and inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of what the path leads to, links followed. Raises OSError."""
        return cls.of_status(path.stat())

    @classmethod
    def of_status(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def is_settled(stamp: Stamp, now: float) -> bool:
    """Whether any later edit must give another stamp; now: seconds since 1970, taken before the stamp was."""
    return max(stamp.mtime_ns, stamp.ctime_ns) < int(now * 1e9) - SETTLED_AFTER_NS
