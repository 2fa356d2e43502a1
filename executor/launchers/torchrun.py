"""torchrun, for ranks on several hosts; also writes which ranks failed, as only their parent can know.

    python -m executor.launchers.torchrun <exits> <arguments of torchrun>

Writes a file, <exits>, see stage_contract.py; times are in whole seconds. torchrun polls every 0.1 s, sends SIGTERM to
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

_forwarded: list[int] = []


def main() -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked by the forkserver; no rank runs yet
    os.environ[AGENT] = str(os.getpid())
    api._terminate_process_handler = _forward_once
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


def _forward_once(number: int, frame: FrameType | None) -> None:
    """The handler of torchrun's signals. A second signal would end it before its ranks, which may still be saving."""
    if not _forwarded:
        _forwarded.append(number)
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))


if __name__ == "__main__":
    sys.exit(main())
