"""Named places, each between two critical system calls, at which a test kills the process that passes.

The table is complete. A node passes the places of lease, commit, run, stage and worker in this order; the
others belong to the command of the same name.

DFLOW_FAIL_AT="name" or "name:3" kills this process by SIGKILL when it passes the place for the first or third time.
DFLOW_FAIL_BY="SIGSTOP" stops it there instead, so that a test can kill this process, another, or both.
"""

from __future__ import annotations

import os
import signal

FAIL_AT = "DFLOW_FAIL_AT"
FAIL_BY = "DFLOW_FAIL_BY"
FAIL_POINTS = {
    "lease:locked": "the lock on the lease is held, its file still names the previous holder",
    "lease:taken": "the lease file names this holder",
    "lease:clearing": "some files of earlier attempts are removed",
    "lease:emptied": "the work folder is ready for a stage",
    "lease:adopting": "the op's own empty state is removed, the adopted one not yet moved here",
    "lease:adopted": "the adopted state is here, the folder that it came from still exists",
    "lease:removing": "the work folder has its hidden name, and is still locked",
    "lease:released": "the hidden work folder is no longer locked",
    "commit:waited": "no process of the stage lives any more",
    "commit:hashed": "the files are on disk and hashed",
    "commit:manifest": "the manifest is written",
    "commit:synced": "the folder and its names are on disk",
    "commit:placing": "the work folder notes what will be placed",
    "commit:aside": "an altered artifact of the same digest is renamed",
    "commit:renamed": "the artifact is in objects/, which may not be on disk yet",
    "commit:placed": "the artifact is in objects/ on disk, without a line in the index",
    "commit:indexed": "the index names the artifact, the work folder still exists",
    "run:lease-taken": "the executor has the lease, nothing is prepared yet",
    "run:emptied": "the work folder is empty except for the op's own state, the stage not yet started",
    "stage:started": "the executor requested the stage's process",
    "stage:ended": "the stage has ended, its results are read",
    "run:commit-begin": "the stage is done, nothing is committed",
    "run:committed": "the artifact is committed and the work folder gone, the record does not have it yet",
    "run:recorded": "the record has the node as done",
    "worker:started": "the stage's process holds its place among the ranks, the op is not loaded",
    "worker:op-done": "the op has returned, its result is not reported",
    "worker:reported": "the stage's process has reported and only has to end",
    "gc:indexed": "the lines of unused artifacts are dropped from the index, the artifacts still exist",
    "gc:renaming": "an unused artifact has its hidden name, others still have theirs",
    "gc:renamed": "everything to be removed has a hidden name",
    "gc:removed": "something with a hidden name is removed",
    "rm:renamed": "the record of a run has its hidden name",
    "push:file": "a file of an artifact is at the remote",
    "push:manifest": "an artifact is complete at the remote, its index line is missing there",
    "pull:file": "a file of an artifact is here, still in the work folder",
    "pull:fetched": "all files of an artifact are here, not checked",
    "pull:sealed": "a pulled artifact is checked and on disk, not yet in its place",
}

_passed: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Kill this process, or send it the signal set for tests, if DFLOW_FAIL_AT names this place; else do nothing."""
    setting = os.environ.get(FAIL_AT)
    if setting is None:
        return
    place, _, count = setting.rpartition(":")
    if not count.isdigit():
        place, count = setting, "1"
    if place != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(count):
        signal.raise_signal(signal.Signals[os.environ.get(FAIL_BY, "SIGKILL")])
