"""Ports for the servers of tests."""

import random
import socket
from pathlib import Path

FIRST = 10_000
HELD: list[socket.socket] = []


def free_port() -> int:
    """A port on which no process listens.

    No connection gets it by chance, and no other process of tests while this one lives. The kernel gives connections,
    and servers that request any port, those of its own range, which is left out here.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = random.randrange(FIRST, max(kernels, 2 * FIRST))
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0port {port} of a test")  # of a process; it needs no file
            with socket.create_server(("127.0.0.1", port)):
                HELD.append(claim)
                return port
        except OSError:  # somebody has it
            claim.close()
    raise AssertionError("no port is free")
