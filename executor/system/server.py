"""A server that never outlives this process: its port, its log, and whether it is ready."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from dsl.errors import DflowError, ServerError
from dsl.files import new_file
from dsl.imports import child_environment
from executor.system.output import last_lines, print_lines
from executor.system.supervisor import ChildGroup, exit_text
from ops.lib.data.proxies import open_directly

POLL_S = 0.5
SHOW_EVERY_S = 5.0
HEALTH_WITHIN_S = 25.0  # SGLang answers after it has generated a token, or after 20 s
LAST_PORT = 65535
HOST_REMEDY = "set --host to an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"


class Server(ChildGroup):
    """A server process. environment: additions to this process's.

    All output of the server goes to the file `log`, or to `pipe` if another thread writes the log.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, pipe: Path | None = None
    ) -> None:
        self.log = log
        with new_file(log) if pipe is None else pipe.open("wb") as output:
            super().__init__(command, child_environment(PYTHONUNBUFFERED="1", **environment), output=output)

    def wait(self) -> NoReturn:
        """Wait until the server ends. Raises ServerError in any case, as a server should not end on its own."""
        self.ended_within(None)
        raise self.died()

    def died(self) -> ServerError:
        """The error for a server that has ended, with the last lines of its log."""
        code = self.close()
        shown = "\n".join(f"    {line}" for line in last_lines(self.log, 0))
        return ServerError(f"the server {exit_text(code)}\n{shown}\nlog: {self.log}")


def wait_until_ready(server: Server, url: str, *, show: bool = True) -> None:
    """Wait until the server is ready. show: print the log's last line every few seconds.

    Raises ServerError where the server ends.
    """
    started = shown_at = time.monotonic()
    while not is_healthy(url):
        if server.ended_within(POLL_S):
            raise server.died()
        now = time.monotonic()
        if show and now - shown_at >= SHOW_EVERY_S:
            shown_at = now
            last = (last_lines(server.log, 0) or ("",))[-1]
            print_lines(f"{now - started:4.0f} s  {last[:120]}")


def is_healthy(url: str) -> bool:
    """Whether the server reports itself ready; False while nothing listens at its address."""
    try:
        with open_directly(f"{url}/health", timeout=HEALTH_WITHIN_S) as response:
            return bool(response.status == 200)
    except (OSError, HTTPException):
        return False


def is_reachable_by_others(host: str) -> bool:
    """Whether other machines may reach a server that listens at this host."""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def require_free_port(host: str, port: int) -> None:
    """Check that a server can listen at a port. Raises DflowError for a port in use, and for an invalid
    port or host.
    """
    if not 1 <= port <= LAST_PORT:
        raise DflowError(f"--port {port}: must be from 1 to {LAST_PORT}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, UnicodeError) as error:
            raise DflowError(f"--host {host}: it has no IPv4 address ({error}); {HOST_REMEDY}") from error
        except OSError as error:
            remedy = HOST_REMEDY if error.errno == errno.EADDRNOTAVAIL else "choose another --port"
            raise DflowError(f"{host}:{port}: {error.strerror}; {remedy}") from error
