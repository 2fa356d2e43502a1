"""Whether the connections of a process group lead to this user's own processes.

Gloo takes whoever connects to its socket and sends a small number for the rank of that number, and ranks unpickle what
they send each other. On the loopback interface every user of the machine can connect. Who it was is known to the
kernel: /proc/net/tcp names the user of both ends (proc(5)). A connection that is there leads to one process for ever,
so one look before the first collective is enough.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from attrs import frozen

from dsl.errors import TransientError
from dsl.stage import RENDEZVOUS

ESTABLISHED, LISTENS = "01", "0A"


@frozen
class Socket:
    """A TCP socket of this machine. local and remote: address and port, as the kernel writes them."""

    local: str
    remote: str
    state: str
    user: int


@contextmanager
def own_peers() -> Iterator[None]:
    """Where all ranks are on one host, the connections that are made inside have to lead to processes of this user.

    Raises TransientError for one that does not, and DistNetworkError for one that has broken.
    """
    if RENDEZVOUS not in os.environ:
        yield
        return
    before = _own()
    yield
    sockets = _sockets()
    by_ends = {(socket.local, socket.remote): socket for socket in sockets.values()}
    for inode in (_own() - before) & sockets.keys():
        socket = sockets[inode]
        if socket.state == LISTENS:
            continue
        if socket.state != ESTABLISHED:
            raise dist.DistNetworkError("the connection to another rank broke: it has ended")
        other = by_ends.get((socket.remote, socket.local))
        if other is not None and other.user != socket.user:
            raise TransientError(
                f"a process of another user (id {other.user}) connected to this rank in the place of another rank; end "
                "that process, or ask that user what it does"
            )


def _own() -> set[str]:
    """The inodes of this process's sockets."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself, and what other threads close
            kind, _, inode = str(descriptor.readlink()).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _sockets() -> dict[str, Socket]:
    """All TCP sockets of this machine by their inodes."""
    found = {}
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                found[fields[9]] = Socket(fields[1], fields[2], fields[3], int(fields[7]))
    return found
