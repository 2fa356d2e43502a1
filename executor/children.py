"""The executor's side of the forkserver: starts it with the first stage, and knows when each stage has ended."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import StageError


class Child:
    """A stage's process. code is None before it ended, and for one whose end nobody saw: the forkserver was killed."""

    def __init__(self, signal: Callable[[int, bool], object]) -> None:
        self.pid: int | None = None
        self.code: int | None = None
        self._signal = signal
        self._ended = threading.Event()

    def wait(self) -> int | None:
        """The exit code, or minus the signal's number."""
        self._ended.wait()
        return self.code

    def ended_within(self, seconds: float) -> bool:
        """Whether it has ended, waiting for it so long."""
        return self._ended.wait(seconds)

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """Nothing happens where the process has ended."""
        self._signal(number, whole_group)

    def end(self, code: int | None) -> None:
        """Called once, by whoever learns of it."""
        self.code = code
        self._ended.set()


class Children:
    """Starts stages. Several threads may ask at once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._server: _Server | None = None
        self._lock = threading.Lock()

    def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """Run `main` of a module in a process of its own; where the forkserver was killed, a new one takes over."""
        with self._lock:
            if self._server is None or self._server.is_gone:
                self._server = _Server(self._environment)
            return self._server.start(
                {"module": module, "arguments": list(arguments), "environment": dict(environment), "log": str(log)}
            )

    def close(self) -> None:
        """End the forkserver, and with it what still runs."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _Server:
    """One forkserver and the thread that reads what it says."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.is_gone = False
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "executor.forkserver", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, request: dict[str, Any]) -> Child:
        with self._lock:
            self._number += 1
            number = self._number
            child = Child(lambda signal, group: self._tell({"signal": number, "number": signal, "group": group}))
            self._children[number] = child
        if not self._tell({"start": number, **request}):
            raise StageError(f"the forkserver (process {self._process.pid}) ended before it could start the stage")
        return child

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _tell(self, value: dict[str, Any]) -> bool:
        """Whether the forkserver was there to hear it."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(value).encode() + b"\n")
        except OSError:
            return False
        return True

    def _read(self) -> None:
        """Until the forkserver is gone: then all that it had started has ended too."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._hear(json.loads(line))
        except ConnectionError:
            pass
        self._process.wait()
        with self._lock:
            self.is_gone = True
            lost = list(self._children.values())
        for child in lost:
            child.end(None)

    def _hear(self, said: dict[str, Any]) -> None:
        if "started" in said:
            self._children[said["started"]].pid = said["pid"]
        else:
            with self._lock:
                child = self._children.pop(said["ended"])
            child.end(said["code"])
