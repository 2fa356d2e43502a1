"""Named places in the commit protocol and the lease at which a test kills the process that comes by.

DFLOW_FAIL_AT="name" or "name:3" kills this process by SIGKILL when it passes the place for the first or third time.
"""

from __future__ import annotations

import os
import signal

FAIL_AT = "DFLOW_FAIL_AT"

_passed: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Does nothing unless DFLOW_FAIL_AT names this place."""
    asked = os.environ.get(FAIL_AT)
    if asked is None:
        return
    place, _, count = asked.partition(":")
    if place != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
