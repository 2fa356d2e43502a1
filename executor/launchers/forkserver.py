"""A process that has imported what every stage needs, never torch, and forks: a stage starts in milliseconds.

    python -m executor.launchers.forkserver FD

FD is a stream socket to the executor, one JSON value a line:

    to here    {"start": number, "module", "arguments", "environment", "log"}
               {"signal": number, "number": signal, "group": whether to the stage's whole process group}
    from here  {"started": number, "pid"}
               {"ended": number, "code": exit code, or minus the signal's number}

A stage is a child in a process group of its own, with no descriptor but the null device and its log. It runs `main` of
the module as a fresh interpreter would: here, at the end of this file. When the executor is gone, all stages are
killed. When this process is gone, the kernel kills them. When a stage has ended, what is left of its group is ended.

Signals that are sent to all processes, by a service manager or at a job's end, are for the executor, which asks the
stages to stop, and for the stages. This process ignores them.

multiprocessing's forkserver, with `executor.launchers.worker` preloaded, was tried in its place (Python 3.11). It does
not give what the tests of kills and signals ask for: after a SIGKILL of the executor the stage, the server, a resource
tracker and a folder in /tmp were left; SIGTERM ended the server, and a stage that still ran had ended with code 255 for
the executor; it reaps a stage at once, so what is left of its group can no longer be signalled safely; a stage has the
server's environment, in memory and in /proc, so no DFLOW_STAGE; it holds the executor's output and its pipes; and each
stage imports the executor's main module anew, which may be a user's script.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define, frozen

from executor.launchers import worker
from executor.system.stage_mark import show_mark
from executor.system.supervisor import end_with_parent
from executor.system.symlinks import open_own

CHUNK = 65536
GROUP_ENDS_WITHIN_S = 1.0
POLL_S = 0.02
FOR_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@frozen
class Start:
    """A request to start a stage; number names the stage between the two processes."""

    number: int
    module: str
    arguments: list[str]
    environment: Mapping[str, str]
    log: str


@define
class _Stage:
    number: int
    pid: int
    descriptor: int  # a pidfd: readable once the process has ended
    kill_at: float = 0.0  # what it left in its group, monotonic


def main() -> int:
    _reset_signals()
    start = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    return 0 if start is None else _run(start)


class Server:
    """Forks and reaps, until the executor is gone."""

    def __init__(self, executor: socket.socket) -> None:
        self._executor = executor
        self._unread = b""
        self._stages: dict[int, _Stage] = {}
        self._ended: list[_Stage] = []  # not reaped yet
        self._selector = selectors.DefaultSelector()
        self._selector.register(executor, selectors.EVENT_READ)

    def serve(self) -> Start | None:
        """Returns None when the executor is gone, and in a child what that child is to run."""
        gc.freeze()  # what is there now is shared with the children: no collection, not even their last, has to copy it
        while True:
            for key, _ in self._selector.select(POLL_S if self._ended else None):
                if key.data is not None:
                    self._note_end(key.data)
                    continue
                received = self._receive()
                if received is None:
                    self._end_all()
                    return None
                for told in received:
                    start = self._obey(told)
                    if start is not None:
                        return start
            for stage in list(self._ended):
                self._reap(stage)

    def _receive(self) -> list[dict[str, Any]] | None:
        """What the executor sent, None where it is gone."""
        try:
            data = self._executor.recv(CHUNK)
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _obey(self, told: dict[str, Any]) -> Start | None:
        """Returns the request in the child that was forked for it."""
        if "signal" in told:
            self._signal(told["signal"], told["number"], whole_group=told["group"])
            return None
        start = Start(told.pop("start"), **told)
        server = os.getpid()
        # A stop that comes before the stage has handlers of its own waits for them: the mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.ENDING)
        pid = os.fork()
        if pid == 0:
            self._leave(server)
            return start
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.setpgid(pid, pid)  # here and in the child: whoever comes first
        stage = _Stage(start.number, pid, os.pidfd_open(pid))
        self._stages[start.number] = stage
        self._selector.register(stage.descriptor, selectors.EVENT_READ, stage)
        self._tell({"started": start.number, "pid": pid})
        return None

    def _leave(self, server: int) -> None:
        """What only concerns the server is closed in the child, which is bound to end with it."""
        os.setpgid(0, 0)
        end_with_parent(server)
        for number in FOR_OTHERS:
            signal.signal(number, _default(number))
        self._executor.close()
        for stage in self._stages.values():
            os.close(stage.descriptor)
        self._selector.close()

    def _signal(self, number: int, signal_number: int, *, whole_group: bool) -> None:
        """A stage that was not reaped yet still owns its process id, so nobody else can be hit."""
        stage = self._stages.get(number)
        if stage is not None:
            (os.killpg if whole_group else os.kill)(stage.pid, signal_number)

    def _note_end(self, stage: _Stage) -> None:
        """What the stage left behind in its group is asked to end."""
        os.killpg(stage.pid, signal.SIGTERM)
        self._selector.unregister(stage.descriptor)
        stage.kill_at = time.monotonic() + GROUP_ENDS_WITHIN_S
        self._ended.append(stage)

    def _reap(self, stage: _Stage) -> None:
        """Once its group is empty, or after a while, by force. Until it is reaped, the group is its own."""
        if time.monotonic() < stage.kill_at and _has_others(stage.pid):
            return
        os.killpg(stage.pid, signal.SIGKILL)
        _, status = os.waitpid(stage.pid, 0)
        os.close(stage.descriptor)
        self._ended.remove(stage)
        del self._stages[stage.number]
        self._tell({"ended": stage.number, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, value: dict[str, Any]) -> None:
        try:
            self._executor.sendall(json.dumps(value).encode() + b"\n")
        except ConnectionError:
            return  # the next read says so too

    def _end_all(self) -> None:
        for stage in self._stages.values():
            os.killpg(stage.pid, signal.SIGKILL)
        for stage in self._stages.values():
            os.waitpid(stage.pid, 0)


def _run(start: Start) -> int:
    """In the child: what a fresh interpreter would find, then the module's main."""
    os.environ.clear()
    os.environ.update(start.environment)
    show_mark()
    try:
        log = open_own(Path(start.log), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        return worker.NO_LOG
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.argv = [start.module, *start.arguments]
    code: int = importlib.import_module(start.module).main()
    return code


def _has_others(group: int) -> bool:
    """Whether a process group has members but its leader."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    return any(_is_in(pid, group) for pid in pids if pid != group)


def _is_in(pid: int, group: int) -> bool:
    """Whether a process that has not ended belongs to the group."""
    try:
        if os.getpgid(pid) != group:
            return False
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _reset_signals() -> None:
    """As in a fresh interpreter, whatever the executor was started with; but what is for others is ignored."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in FOR_OTHERS else _default(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _default(number: int) -> Any:
    if number in IGNORED_BY_PYTHON:
        return signal.SIG_IGN
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


if __name__ == "__main__":
    sys.exit(main())
