"""Named places, each between two system calls that matter, at which a test kills the process that comes by.

DFLOW_FAIL_AT="name" or "name:3" kills this process by SIGKILL when it passes the place for the first or third time.
"""

from __future__ import annotations

import os
import signal

FAIL_AT = "DFLOW_FAIL_AT"
FAIL_POINTS = {
    "lease:locked": "the lock on the lease is held, its file still names the holder before",
    "lease:taken": "the lease file names this holder",
    "lease:clearing": "some of what earlier attempts left is removed",
    "lease:emptied": "the work folder is ready for a stage",
    "lease:adopting": "the op's own empty state is removed, the adopted one not yet moved here",
    "lease:adopted": "the adopted state is here, the folder that it came from still stands",
    "lease:removing": "the work folder has its hidden name, and is still locked",
    "lease:released": "the hidden work folder is no longer locked",
    "commit:waited": "no process of the stage lives any more",
    "commit:hashed": "the files are on disk and hashed",
    "commit:manifest": "the manifest is written",
    "commit:synced": "the folder and its names are on disk",
    "commit:placing": "what is to be placed is put down in the work folder",
    "commit:aside": "an altered artifact of the same digest is put aside",
    "commit:renamed": "the artifact stands in objects/, which may not be on disk yet",
    "commit:placed": "the artifact stands in objects/ on disk, without a line in the index",
    "commit:indexed": "the index names the artifact, the work folder still stands",
}

_passed: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Does nothing unless DFLOW_FAIL_AT names this place."""
    asked = os.environ.get(FAIL_AT)
    if asked is None:
        return
    place, _, count = asked.rpartition(":")
    if not count.isdigit():
        place, count = asked, "1"
    if place != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
