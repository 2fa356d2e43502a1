"""Whether a port is free, asked before a server is started there."""

from __future__ import annotations

import errno
import socket

from dsl.errors import DflowError

LAST_PORT = 65535
HOST_REMEDY = "give --host an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them"


def require_free_port(host: str, port: int) -> None:
    """Raises DflowError where something listens there already, where the host is not this machine's, and for what is no
    port or no host at all.
    """
    if not 1 <= port <= LAST_PORT:
        raise DflowError(f"--port {port}: ports are 1 to {LAST_PORT}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (socket.gaierror, UnicodeError) as error:
            raise DflowError(f"--host {host}: no IPv4 address is known for it ({error}); {HOST_REMEDY}") from error
        except OSError as error:
            remedy = HOST_REMEDY if error.errno == errno.EADDRNOTAVAIL else "choose another --port"
            raise DflowError(f"{host}:{port}: {error.strerror}; {remedy}") from error
