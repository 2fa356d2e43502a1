"""A process that ends with the one that started it, whatever it is doing: the kernel sees to it.

    python -m executor.system.parent PID MODULE ARGUMENTS...

runs a module as `python -m` does, and ends with the process PID, which started it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
GONE = 70
LIBC = ctypes.CDLL(None)


def end_with_parent(parent: int) -> None:
    """Be killed when the parent is; at once where it is gone already. parent: its process id."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(GONE)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
