"""Where a pool's workers listen: a file each in a folder that the whole stage sees, replaced by none.

    <folder>/<worker>-<start>.json      {"unix": name of a socket in the private folder} or {"host", "port"}
    <folder>/<worker>-<start>.hung      a rank found that it answers no more: its parent process kills it

A worker that starts again has another file, so nobody connects to one that is gone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsl.files import write_json
from dsl.stage import HUNG, PoolRendezvous

# A peer whose host vanished is noticed within about 10 s.
KEEPALIVE = {socket.TCP_KEEPIDLE: 4, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}


def listen(pool: PoolRendezvous) -> socket.socket:
    """Listen on this worker's address, and announce it."""
    if pool.address:
        family = socket.AF_INET6 if ":" in pool.address else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.bind((pool.address, 0))
        place = {"host": pool.address, "port": listening.getsockname()[1]}
    else:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(pool.private) as folder:
            listening.bind(f"{folder}/{pool.name}")
        place = {"unix": pool.name}
    listening.listen(128)
    pool.folder.mkdir(exist_ok=True)
    write_json(pool.folder / f"{pool.name}.json", place)
    return listening


def announced(pool: PoolRendezvous) -> list[str]:
    """The names of the workers that have announced themselves; listed, as NFS may hide new files."""
    return sorted(file.stem for file in pool.folder.glob("*.json"))


def connect(pool: PoolRendezvous, name: str) -> socket.socket:
    """Connect to a worker by its announced name. Raises OSError where it does not listen."""
    place = json.loads((pool.folder / f"{name}.json").read_bytes())
    if "unix" in place:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(pool.private) as folder:
                connected.connect(f"{folder}/{place['unix']}")
        except OSError:
            connected.close()
            raise
        return connected
    connected = socket.create_connection((place["host"], place["port"]), timeout=10)
    connected.settimeout(None)
    keep_alive(connected)
    return connected


def keep_alive(connected: socket.socket) -> None:
    """Notice a vanished peer, and send small frames at once; unix sockets need neither."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def report_hung(pool: PoolRendezvous, name: str) -> None:
    """Ask the parent of a worker to kill it."""
    (pool.folder / f"{name}{HUNG}").touch()


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A short name of a folder: the address of a unix socket has at most 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
