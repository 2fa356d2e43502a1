"""A server in a process of its own, which never outlives this one: its group, its log, and whether it is ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from executor.keys.node_key import PROJECT
from executor.launchers.compile_cache import compile_cache
from executor.launchers.log_tail import LINES
from executor.model_tools.chat_request import ServerError, is_healthy
from executor.system.output import print_lines
from executor.system.symlinks import new_file

POLL_S = 0.5
TELL_EVERY_S = 5.0


class Server:
    """A server's process, its group and its log. Everything ends with `close`, or with this process.

    command: run as it is, with `environment` added to that of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        life_line, self._held = os.pipe()
        path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with new_file(log) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "executor.system.guard", str(life_line), *command],
                env={
                    **os.environ,
                    **compile_cache(),
                    **environment,
                    "PYTHONPATH": os.pathsep.join(path),
                    "PYTHONSAFEPATH": "1",  # no `ops` in the working directory can shadow the real one
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(life_line,),
                process_group=0,
            )
        os.close(life_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it ends. Raises ServerError then: a server does not end by itself."""
        self._process.wait()
        raise self.died()

    def close(self) -> None:
        """Ask everything in the group to stop, and wait for its end; the guard kills what does not stop."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        self._process.wait()
        with suppress(ProcessLookupError):  # where the guard itself was killed, or the server left children
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self) -> list[str]:
        with self.log.open("rb") as file:
            return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=LINES)]

    def died(self) -> ServerError:
        """What to tell of a server that ended: the last lines of its log."""
        shown = "\n".join(f"    {line}" for line in self.last_lines())
        return ServerError(f"the server ended with exit code {self._process.wait()}\n{shown}\nlog: {self.log}")


def wait_until_ready(server: Server, url: str, *, tell: bool = True) -> None:
    """tell: the last line of the log every few seconds. Raises ServerError where the server ends."""
    started = told_at = time.monotonic()
    while not is_healthy(url):
        if not server.is_alive():
            raise server.died()
        now = time.monotonic()
        if tell and now - told_at >= TELL_EVERY_S:
            told_at = now
            last = (server.last_lines() or [""])[-1]
            print_lines(f"{now - started:4.0f} s  {last[:120]}")
        time.sleep(POLL_S)
