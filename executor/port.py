"""Whether a port is free, asked before a server is started there."""

from __future__ import annotations

import socket

from dsl.errors import DflowError


def require_free_port(host: str, port: int) -> None:
    """Raises DflowError where something listens there already, or where the host is not this machine's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DflowError(f"{host}:{port}: {error.strerror}; choose another --port") from error
