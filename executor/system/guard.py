"""Runs a server that must not outlive the process that asked for it: python -m executor.system.guard FD COMMAND...

FD is the reading end of a pipe whose only writer is that process, so it ends with it, however that comes about. Then,
or when the writer is closed, everything in this process's group is asked to stop, and killed where it does not.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

WATCH_EVERY_S = 0.2
GRACE_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """The server's exit code, where it ends by itself."""
    life_line = int(arguments[0])
    # A handler, not SIG_IGN: the server would inherit that.
    signal.signal(signal.SIGTERM, _stay)
    server = subprocess.Popen(arguments[1:])
    while server.poll() is None:
        ready, _, _ = select.select([life_line], [], [], WATCH_EVERY_S)
        if ready:
            _stop_group(server)
    return server.returncode


def _stop_group(server: subprocess.Popen[bytes]) -> None:
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(WATCH_EVERY_S)
    os.killpg(0, signal.SIGKILL)


def _stay(number: int, frame: FrameType | None) -> None:
    """The signal is for the rest of the group."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
