"""torchrun, for ranks on several hosts, with a note of those that ended badly, for what only their parent can know.

    python -m executor.launchers.torchrun <exits> <arguments of torchrun>

Writes a file, <exits>, see stage_contract.py; times are in whole seconds. torchrun looks every 0.1 s, sends SIGTERM to
the others as soon as one rank has failed, and SIGKILL 30 s later: `executor.launchers.worker` ends them earlier.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from executor.launchers.stage_contract import RankExit, write_exits
from executor.launchers.worker import AGENT, ENDING

_passed_on: list[int] = []


def main() -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # which the forkserver held back; no rank is there yet
    os.environ[AGENT] = str(os.getpid())
    api._terminate_process_handler = _once
    try:
        torchrun(sys.argv[2:])
    except ChildFailedError as failed:
        failures = failed.failures.items()
        write_exits(
            Path(sys.argv[1]), [RankExit(rank, failure.exitcode, failure.timestamp) for rank, failure in failures]
        )
        return 1
    except SignalException:  # it passed SIGTERM on to its ranks, and they have ended
        return 1
    return 0


def _once(number: int, frame: FrameType | None) -> None:
    """The handler of torchrun's signals. A second signal would end it before its ranks, which may be saving."""
    if not _passed_on:
        _passed_on.append(number)
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


if __name__ == "__main__":
    sys.exit(main())
