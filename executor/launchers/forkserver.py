"""A process that has imported what every stage needs, never torch, and forks: a stage starts in milliseconds.

    python -m executor.launchers.forkserver FD

FD is a stream socket to the executor, which sends Start, Prepare and Signal and gets Started and Ended, each as a line
of JSON: the class's name and its fields.

A spare is a child that waits: it has imported libraries with the threads, GPUs and variables that the next stage is
expected to have, and becomes that stage if it has them. It imports nothing of dflow's ops or of the user, whose code
may be edited meanwhile.

A stage is a child in a process group of its own, with no descriptor but the null device and its log. It runs `main` of
the module as a fresh interpreter would (see `_run`). When the executor is gone, all stages are
killed. When this process is gone, the kernel kills them. When a stage has ended, the rest of its group is ended.

Signals sent to all processes, by a service manager or at a job's end, are handled by the executor, which asks the
stages to stop, and by the stages. This process ignores them.

multiprocessing's forkserver, with `executor.launchers.worker` preloaded, was tried instead (Python 3.11). It does
not pass the tests of kills and signals: after a SIGKILL of the executor the stage, the server, a resource
tracker and a folder in /tmp were left; SIGTERM ended the server, and a stage that still ran had ended with code 255 for
the executor; it reaps a stage at once, so the rest of its group can no longer be signalled safely; a stage has the
server's environment, in memory and in /proc, so no DFLOW_STAGE; it holds the executor's output and its pipes; and each
stage imports the executor's main module again, which may be a user's script.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, frozen

from dsl.convert import structure, unstructure
from dsl.files import open_own
from dsl.json_files import compact
from dsl.named_function import named_function
from executor.launchers import worker
from executor.launchers.stage_contract import LIFE_LINE
from executor.system.garbage import no_collection
from executor.system.stage_mark import STAGE, show_mark
from executor.system.supervisor import end_with_parent

CHUNK = 65536
SPARE_RUNS = worker.__name__
GROUP_ENDS_WITHIN_S = 1.0
POLL_S = 0.02
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


@frozen
class Start:
    """A request to run a module's `main`. number: identifies the stage in all messages."""

    number: int
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: str


@frozen
class Prepare:
    """A request to have a spare with these libraries for a stage of that environment; another spare is ended."""

    environment: Mapping[str, str]
    libraries: tuple[str, ...]


@frozen
class Signal:
    """A request to send a signal to a stage, or to its whole process group."""

    number: int
    signal: int
    whole_group: bool


@frozen
class Started:
    number: int
    pid: int


@frozen
class Ended:
    """code: the exit code, or minus the signal's number."""

    number: int
    code: int


Message = Start | Prepare | Signal | Started | Ended
MESSAGES: Mapping[str, type[Message]] = {kind.__name__: kind for kind in (Start, Prepare, Signal, Started, Ended)}


def encoded(message: Message) -> bytes:
    """The message as a line."""
    return compact([type(message).__name__, unstructure(message)])


def decoded(line: bytes) -> Message:
    name, fields = json.loads(line)
    return structure(MESSAGES[name], fields)


@define
class _Stage:
    number: int
    pid: int
    descriptor: int  # a pidfd: readable once the process has ended
    kill_at: float = 0.0  # when the rest of its group is killed, monotonic


@frozen
class _Spare:
    """descriptor: a pidfd; order: a socket, on which the Start is sent."""

    pid: int
    descriptor: int
    order: socket.socket
    environment: Mapping[str, str]

    def takes(self, start: Start) -> bool:
        """Send it the request, if it can become that stage; False also where it has been killed."""
        is_alive = not select.select([self.descriptor], [], [], 0)[0]
        if not is_alive or start.module != SPARE_RUNS or _lasting(start.environment) != _lasting(self.environment):
            return False
        try:
            self.order.sendall(encoded(start))
        except ConnectionError:  # killed just now
            return False
        return True


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not an attempt's own."""
    return {name: value for name, value in environment.items() if name not in (STAGE, LIFE_LINE)}


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
        self._spare: _Spare | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(executor, selectors.EVENT_READ)

    def serve(self) -> Start | None:
        """Returns None when the executor is gone, and in a child the request that it is to run."""
        gc.freeze()  # keeps collections in the children from copying the pages that they share with this process
        while True:
            for key, _ in self._selector.select(POLL_S if self._ended else None):
                if key.data is not None:
                    self._note_end(key.data)
                    continue
                received = self._receive()
                if received is None:
                    self._end_all()
                    return None
                for request in received:
                    start = self._handle(request)
                    if start is not None:
                        return start
            for stage in list(self._ended):
                self._reap(stage)

    def _receive(self) -> list[Message] | None:
        """The executor's requests, None where it is gone."""
        try:
            data = self._executor.recv(CHUNK)
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [decoded(line) for line in lines]

    def _handle(self, request: Message) -> Start | None:
        """Returns the request to start, in the child that was forked for it."""
        if isinstance(request, Signal):
            self._signal(request)
        if isinstance(request, Prepare):
            return self._prepare(request)
        if not isinstance(request, Start):
            return None
        if (spare := self._spare) is not None and spare.takes(request):
            self._spare = None
            spare.order.close()
            self._keep(_Stage(request.number, spare.pid, spare.descriptor))
            return None
        self._end_spare()
        pid = self._fork()
        if pid == 0:
            return request
        self._keep(_Stage(request.number, pid, os.pidfd_open(pid)))
        return None

    def _prepare(self, request: Prepare) -> Start | None:
        """In the child: import the libraries, and wait for the request to start; the child's end without one."""
        if self._spare is not None and self._spare.environment == request.environment:
            return None
        self._end_spare()
        ours, theirs = socket.socketpair()
        pid = self._fork()
        if pid:
            theirs.close()
            self._spare = _Spare(pid, os.pidfd_open(pid), ours, request.environment)
            return None
        ours.close()
        return _spare(request, theirs)

    def _end_spare(self) -> None:
        if self._spare is not None:
            spare, self._spare = self._spare, None
            os.killpg(spare.pid, signal.SIGKILL)
            os.waitpid(spare.pid, 0)
            os.close(spare.descriptor)
            spare.order.close()

    def _fork(self) -> int:
        """In the child 0, which holds nothing of the server's."""
        server = os.getpid()
        # A stop signal that arrives before the stage has installed its handlers stays pending: the mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, worker.ENDING)
        pid = os.fork()
        if pid == 0:
            self._leave(server)
            return 0
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.setpgid(pid, pid)  # in both processes, since either may run first
        return pid

    def _keep(self, stage: _Stage) -> None:
        self._stages[stage.number] = stage
        self._selector.register(stage.descriptor, selectors.EVENT_READ, stage)
        self._send(Started(stage.number, stage.pid))

    def _leave(self, server: int) -> None:
        """Close the server's descriptors in the child, which ends with the server."""
        os.setpgid(0, 0)
        end_with_parent(server)
        for number in IGNORED_SIGNALS:
            signal.signal(number, _default(number))
        self._executor.close()
        for stage in self._stages.values():
            os.close(stage.descriptor)
        if self._spare is not None:
            os.close(self._spare.descriptor)
            self._spare.order.close()
        self._selector.close()

    def _signal(self, request: Signal) -> None:
        """Safe, since a stage that was not reaped yet still owns its process id."""
        stage = self._stages.get(request.number)
        if stage is not None:
            (os.killpg if request.whole_group else os.kill)(stage.pid, request.signal)

    def _note_end(self, stage: _Stage) -> None:
        """Send SIGTERM to the rest of the stage's group."""
        os.killpg(stage.pid, signal.SIGTERM)
        self._selector.unregister(stage.descriptor)
        stage.kill_at = time.monotonic() + GROUP_ENDS_WITHIN_S
        self._ended.append(stage)

    def _reap(self, stage: _Stage) -> None:
        """Reap the stage once its group is empty, or after a while by SIGKILL. Until then the group id is its own."""
        if time.monotonic() < stage.kill_at and _has_others(stage.pid):
            return
        os.killpg(stage.pid, signal.SIGKILL)
        _, status = os.waitpid(stage.pid, 0)
        os.close(stage.descriptor)
        self._ended.remove(stage)
        del self._stages[stage.number]
        self._send(Ended(stage.number, os.waitstatus_to_exitcode(status)))

    def _send(self, reply: Message) -> None:
        try:
            self._executor.sendall(encoded(reply))
        except ConnectionError:
            return  # the next read notices too

    def _end_all(self) -> None:
        self._end_spare()
        for stage in self._stages.values():
            os.killpg(stage.pid, signal.SIGKILL)
        for stage in self._stages.values():
            os.waitpid(stage.pid, 0)


def _spare(request: Prepare, order: socket.socket) -> Start:
    """In the child: becomes ready and waits. Exits where the server wants no stage of it."""
    os.environ.clear()
    os.environ.update(request.environment)
    with no_collection():
        for name in request.libraries:
            with suppress(ImportError):  # which the stage itself raises, in its log
                importlib.import_module(name)
    with order, order.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        sys.exit()
    start = decoded(line)
    assert isinstance(start, Start)
    return start


def _run(start: Start) -> int:
    """In the child: set up the process as a fresh interpreter would find it, then run the module's main."""
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
    main: Callable[[], int] = named_function(f"{start.module}:main")
    return main()


def _has_others(group: int) -> bool:
    """Whether a process group has members besides its leader."""
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
    """Reset handlers to a fresh interpreter's, whatever the executor was started with, but ignore IGNORED_SIGNALS."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in IGNORED_SIGNALS else _default(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _default(number: int) -> Any:
    if number in PYTHON_IGNORES:
        return signal.SIG_IGN
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


if __name__ == "__main__":
    sys.exit(main())
