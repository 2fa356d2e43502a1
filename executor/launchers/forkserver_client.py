"""The executor's side of the forkserver: starts it with the first stage, and reports when each stage has ended."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsl.errors import StageError
from executor.launchers.forkserver import Ended, Message, Prepare, Signal, Start, Started, decoded, encoded
from executor.system.stage_mark import ROOM, STAGE
from executor.system.supervisor import module_command

WATCH_S = 0.5
REPORT_WITHIN_S = 2.0
CLOSE_WITHIN_S = 5.0
DEFERRED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Child:
    """A stage's process. code is None before it ended, and for one whose end nobody saw: the forkserver was killed."""

    def __init__(self, signal: Callable[[int, bool], object]) -> None:
        self.code: int | None = None
        self._signal = signal
        self._ended = threading.Event()
        self._pid: int | None = None
        self._descriptor: int | None = None
        self._killed_at: float | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """None before it is known."""
        return self._pid

    def wait(self) -> int | None:
        """The exit code, or minus the signal's number."""
        while not self.ended_within(WATCH_S):
            pass
        return self.code

    def ended_within(self, seconds: float) -> bool:
        """Whether it has ended within that time. The end of a killed process is also detected here."""
        if not self._ended.wait(seconds) and self._is_dead_unreported():
            self.end(-signal.SIGKILL)
        return self._ended.is_set()

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """Send a signal; does nothing where the process has ended."""
        self._signal(number, whole_group)
        if number == signal.SIGKILL:
            self._kill()

    def started(self, pid: int) -> None:
        """Called once it has a process id."""
        with self._lock:
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:  # it ended at once, which is reported next
                return
            self._pid = pid
            is_killed = self._killed_at is not None
        if is_killed:
            self._kill()

    def end(self, code: int | None) -> None:
        """Called by any thread that learns of the end; the first call counts."""
        with self._lock:
            if not self._ended.is_set():
                self.code = code
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            self._ended.set()

    def _kill(self) -> None:
        """Kill without the forkserver, which may be stopped or hang."""
        with self._lock:
            if self._killed_at is None:
                self._killed_at = time.monotonic()
            if self._descriptor is None or self._pid is None:
                return
            try:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                os.killpg(self._pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return

    def _is_dead_unreported(self) -> bool:
        """Whether it was killed a while ago and is gone, though the forkserver has not reported it."""
        with self._lock:
            if self._killed_at is None or time.monotonic() < self._killed_at + REPORT_WITHIN_S:
                return False
            if self._descriptor is None:  # not even its start was reported
                return True
            return bool(select.select([self._descriptor], [], [], 0)[0])


class Children:
    """Starts stages. Thread-safe."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._server: _Server | None = None
        self._lock = threading.Lock()

    def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Run `main` of a module in a process of its own; starts another forkserver if the last one was killed."""
        with self._lock:
            if self._server is None or self._server.is_gone:
                self._server = _Server(self._environment)
            return self._server.start(module, tuple(arguments), environment, str(log))

    def prepare(self, environment: Mapping[str, str], libraries: Sequence[str]) -> None:
        """Have a process ready that has imported these, for a stage of that environment; see forkserver.py."""
        with self._lock:
            if self._server is not None and not self._server.is_gone:
                self._server.prepare(Prepare(environment, tuple(libraries)))

    def close(self) -> None:
        """End the forkserver, and with it all running stages."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _Server:
    """One forkserver and the thread that reads its replies."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.is_gone = False
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._socket, theirs = socket.socketpair()
        # Blocked until the forkserver ignores them: the mask is inherited.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    module_command("executor.launchers.forkserver", str(theirs.fileno())),
                    env={**environment, STAGE: " " * ROOM},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str], log: str) -> Child:
        with self._lock:
            self._number += 1
            number = self._number
            child = Child(lambda signal, group: self._send(Signal(number, signal, group)))
            self._children[number] = child
        if not self._send(Start(number, module, arguments, environment, log)):
            raise StageError(f"the forkserver (process {self._process.pid}) ended before it could start the stage")
        return child

    def prepare(self, request: Prepare) -> None:
        self._send(request)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _send(self, request: Message) -> bool:
        """Whether the forkserver still runs."""
        try:
            with self._lock:
                self._socket.sendall(encoded(request))
        except OSError:
            return False
        return True

    def _read(self) -> None:
        """Read until the forkserver is gone: then all stages that it started have ended too."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._handle(decoded(line))
        except ConnectionError:
            pass
        try:
            self._process.wait(CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:  # stopped or hanging; its stages end with it
            self._process.kill()
            self._process.wait()
        with self._lock:
            self.is_gone = True
            lost = list(self._children.values())
        for child in lost:
            child.end(None)

    def _handle(self, reply: Message) -> None:
        if isinstance(reply, Started):
            self._children[reply.number].started(reply.pid)
        elif isinstance(reply, Ended):
            with self._lock:
                child = self._children.pop(reply.number)
            child.end(reply.code)
