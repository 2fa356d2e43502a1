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
    "run:lease-taken": "the executor has the lease, nothing is prepared yet",
    "run:emptied": "the work folder is empty but for the op's own state, the stage not yet started",
    "stage:started": "the executor asked for the stage's process",
    "stage:ended": "the stage has ended, its results are read",
    "run:commit-begin": "the stage is done, nothing is committed",
    "run:committed": "the artifact is committed and the work folder gone, the record says nothing of it",
    "run:recorded": "the record says that the node is done",
    "worker:started": "the stage's process holds its place among the ranks, the op is not loaded",
    "worker:op-done": "the op has returned, its result is not reported",
    "worker:reported": "the stage's process has nothing more to do",
    "gc:indexed": "the lines of what goes are dropped from the index, the artifacts still stand",
    "gc:renaming": "an artifact has its hidden name, others that go still stand",
    "gc:renamed": "all that goes has a hidden name",
    "gc:removed": "something that had a hidden name is gone",
    "rm:renamed": "the record of a run has its hidden name",
    "push:file": "a file of an artifact is at the other place",
    "push:manifest": "an artifact is whole at the other place, its index line is not there",
    "pull:file": "a file of an artifact is here, still in the work folder",
    "pull:fetched": "all files of an artifact are here, not checked",
    "pull:sealed": "a pulled artifact is checked and on disk, not yet in its place",
}

_passed: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Does nothing unless DFLOW_FAIL_AT names this place."""
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
