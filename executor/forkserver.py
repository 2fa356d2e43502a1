"""A process that has imported what every stage needs, never torch, and forks: a stage starts in milliseconds.

    python -m executor.forkserver FD

FD is a stream socket to the executor, one JSON value a line:

    to here    {"start": number, "module", "arguments", "environment", "log"}
               {"signal": number, "number": signal, "group": whether to the stage's whole process group}
    from here  {"started": number, "pid"}
               {"ended": number, "code": exit code, or minus the signal's number}

A stage is a child in a process group of its own, with no descriptor but the null device and its log. It runs `main` of
the module as a fresh interpreter would: here, at the end of this file. When the executor is gone, all stages are
killed. When this process is gone, the kernel kills them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from attrs import define, frozen

from executor import worker

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
CHUNK = 65536


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


def main() -> int:
    start = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    return 0 if start is None else _run(start)


class Server:
    """Forks and reaps, until the executor is gone."""

    def __init__(self, executor: socket.socket) -> None:
        self._executor = executor
        self._unread = b""
        self._stages: dict[int, _Stage] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(executor, selectors.EVENT_READ)

    def serve(self) -> Start | None:
        """Returns None when the executor is gone, and in a child what that child is to run."""
        gc.freeze()  # what is there now is shared with the children: no collection, not even their last, has to copy it
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                    continue
                received = self._receive()
                if received is None:
                    self._end_all()
                    return None
                for told in received:
                    start = self._obey(told)
                    if start is not None:
                        return start

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
        pid = os.fork()
        if pid == 0:
            self._leave(server)
            return start
        os.setpgid(pid, pid)  # here and in the child: whoever comes first
        stage = _Stage(start.number, pid, os.pidfd_open(pid))
        self._stages[start.number] = stage
        self._selector.register(stage.descriptor, selectors.EVENT_READ, stage)
        self._tell({"started": start.number, "pid": pid})
        return None

    def _leave(self, server: int) -> None:
        """What only concerns the server is closed in the child, which is bound to end with it."""
        os.setpgid(0, 0)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(worker.EXECUTOR_GONE)
        self._executor.close()
        for stage in self._stages.values():
            os.close(stage.descriptor)
        self._selector.close()

    def _signal(self, number: int, signal_number: int, *, whole_group: bool) -> None:
        """A stage that was not reaped yet still owns its process id, so nobody else can be hit."""
        stage = self._stages.get(number)
        if stage is not None:
            (os.killpg if whole_group else os.kill)(stage.pid, signal_number)

    def _reap(self, stage: _Stage) -> None:
        """What the stage left behind in its group is asked to end; until it is reaped, the group is its own."""
        os.killpg(stage.pid, signal.SIGTERM)
        _, status = os.waitpid(stage.pid, 0)
        self._selector.unregister(stage.descriptor)
        os.close(stage.descriptor)
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
    log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.argv = [start.module, *start.arguments]
    code: int = importlib.import_module(start.module).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
