"""An engine's own HTTP server in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from attrs import frozen
from ports import free_port

START_S = 300  # 20 on a machine with nothing else to do


@frozen
class Server:
    """A running server. url: without a path. log: its output."""

    url: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def running_command(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Server]:
    """Open a context with a server: the command with `--host` and `--port`, once it is healthy.

    It is ended with all its processes. folder: for the log. Fails with the log if the server ends, or is not healthy
    after START_S seconds.
    """
    port, log = free_port(), folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_healthy(server, process)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{server.output[-4000:]}"
        try:
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise AssertionError(f"the server is not healthy after {START_S} s:\n{server.output[-4000:]}")
