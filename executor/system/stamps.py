"""A cheap test that a file is unchanged: size, times and inode, as the file system keeps them.

ctime is set by the kernel at every write, so an edit that resets mtime is noticed too. Clocks have
limited resolution, though: two edits of the same size within it leave the same stamp. So facts about a file changed
a moment ago, or in the future by a clock that jumped, must not be cached under its stamp.
"""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

SETTLED_AFTER_NS = 2_000_000_000  # FAT's resolution of two seconds, the coarsest in use


@frozen
class Stamp:
    """A file's size in bytes, times in nanoseconds since 1970, and inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of a file, following links. Raises OSError."""
        return cls.of_status(path.stat())

    @classmethod
    def of_status(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def is_settled(stamp: Stamp, now: float) -> bool:
    """Whether any later edit of a file must change its stamp. now: seconds since 1970, read before the stamp."""
    return max(stamp.mtime_ns, stamp.ctime_ns) < int(now * 1e9) - SETTLED_AFTER_NS
