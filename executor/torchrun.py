"""torchrun with a note of the ranks that ended badly, for what only their parent can know: the signal that killed one.

    python -m executor.torchrun <exits> <arguments of torchrun>

Writes a file, <exits>: a list of {"rank", "code", "time"}: code is the exit code, or minus the signal's number;
time is in whole seconds, when torchrun saw it. torchrun looks every 0.1 s, sends SIGTERM to the others as soon as one
rank has failed, and SIGKILL 30 s later: `executor.worker` ends them earlier.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from executor.jsonlines import write_json


def main() -> int:
    try:
        torchrun(sys.argv[2:])
    except ChildFailedError as failed:
        exits = [
            {"rank": rank, "code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in failed.failures.items()
        ]
        write_json(Path(sys.argv[1]), exits)
        return 1
    except SignalException:  # it passed SIGTERM on to its ranks, and they have ended
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
