"""One host's processes of a stage: their environment, life line, log and start. Every backend runs them by this."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from attrs import frozen

from dsl.files import appended
from dsl.os_errors import clear_errors
from executor.launchers.backend import StageOrder, exits_path, host_log
from executor.launchers.forkserver_client import Children
from executor.launchers.redacted_log import RedactedLog
from executor.launchers.stage_contract import LIFE_LINE
from executor.launchers.stage_environment import stage_environment
from executor.system.stage_mark import STAGE


@frozen(kw_only=True)
class HostPart:
    """A host's part of a stage. number: from 0; gpus: the devices that its ranks see, None for all; address: where
    rank 0 listens, "host:port", empty where all ranks are on this host; variables: added to the environment.
    """

    number: int = 0
    gpus: tuple[str, ...] | None = None
    address: str = ""
    variables: Mapping[str, str] = {}


class HostRunner:
    """Starts a host's processes, signals them, and reports how they ended.

    The life line is a FIFO with this process as only writer: it breaks when this process ends, however it ends.
    """

    def __init__(self, children: Children, order: StageOrder, part: HostPart, secrets: Sequence[str] = ()) -> None:
        """secrets: the values that the log must not show."""
        log = host_log(order.log, part.number)
        with clear_errors(log):
            appended(log).close()
        self._life_line_path = order.private / f"alive-{part.number}"
        with clear_errors(order.private):
            os.mkfifo(self._life_line_path)
            self._life_line = os.open(self._life_line_path, os.O_RDWR)
            self._redacted = RedactedLog(order.private / f"output-{part.number}", log, secrets) if secrets else None
        environment = {
            **stage_environment(order.share.threads, part.gpus),
            **part.variables,
            STAGE: order.mark,
            LIFE_LINE: str(self._life_line_path),
        }
        module, arguments = _command(order, part)
        output = log if self._redacted is None else self._redacted.pipe
        self._child = children.start(module, arguments, environment, output)

    @property
    def pid(self) -> int | None:
        """Of the worker, or the parent of the ranks; None before it is known."""
        return self._child.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal's number; None where nobody saw it end."""
        return self._child.code

    @property
    def log_errno(self) -> int:
        """Of the error for which the log with redacted secrets could not be written, 0 where there was none."""
        error = None if self._redacted is None else self._redacted.error
        return 0 if error is None else error.errno or errno.EIO

    def ended_within(self, seconds: float) -> bool:
        """Whether all processes have ended within that time."""
        return self._child.ended_within(seconds)

    def request_stop(self) -> None:
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL, whole_group=True)

    def close(self) -> None:
        """Once all processes have ended; the log is complete then."""
        os.close(self._life_line)
        with suppress(OSError):  # the folder may be gone
            self._life_line_path.unlink()
        if self._redacted is not None:
            self._redacted.close()


def _command(order: StageOrder, part: HostPart) -> tuple[str, list[str]]:
    """The module whose `main` runs a host's part, and its arguments."""
    launch = order.launch
    if launch.kind == "process" and launch.shard_workers == 1:
        return "executor.launchers.worker", [str(order.job), order.job_digest]
    arguments = [
        *("--exits", str(exits_path(order.results, part.number))),
        *("--first", str(part.number * launch.processes_of_part)),
        *("--here", str(launch.processes_of_part)),
        *("--total", str(launch.processes)),
        *("--meet", part.address or str(order.private / "store")),
    ]
    shared = ["--shared"] if launch.shard_workers > 1 else []
    return "executor.launchers.ranks", [*arguments, *shared, str(order.job), order.job_digest]
