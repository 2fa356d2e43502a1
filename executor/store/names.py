"""The names that dflow gives to files in a store; files with other names are not dflow's, and are kept.

objects/<digest>                an artifact
objects/<digest>.damaged        one that was set aside, see integrity.py
objects/.gone-<digest>-<pid>    one that is being removed, see maintenance/gc.py
index/<key>                     what a key gave
work/<key>                      work in progress, see lease.py
work/<key>.<id>                 work whose input data changed, see scheduler/attempt.py
work/.<key>.<id>                either of these two while it is being removed
work/.<run id>                  the record of a run that is being removed, see maintenance/gc.py
records/<run id>                a run
"""

from __future__ import annotations

import re

_HASH, _RUN = "[0-9a-f]{64}", r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4,}"

DIGEST = re.compile(_HASH)
KEY = re.compile(_HASH)
RUN_ID = re.compile(_RUN)
RUN = re.compile(r"\w[\w.-]*", re.ASCII)  # of any version of dflow: an index line may be pulled
OUT = re.compile(r"out-[0-9]+-[0-9a-f]{8}")  # in a work folder
DAMAGED = ".damaged"
GONE = ".gone-"

IN_OBJECTS = re.compile(rf"{_HASH}({re.escape(DAMAGED)})?|{re.escape(GONE)}{_HASH}-[0-9]+")
IN_WORK = re.compile(rf"{_HASH}(\.[0-9a-f]{{8}})?")
REMOVED_FROM_WORK = re.compile(rf"\.({_HASH}(\.[0-9a-f]{{8}})?\.[0-9a-f]{{32}}|{_RUN})")
