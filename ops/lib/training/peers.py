"""Whether the connections of a process group lead to this user's own processes.

Gloo accepts any process that connects to its socket and sends a small number, as the rank of that number, and ranks
unpickle what they receive. On the loopback interface every user of the machine can connect. The kernel knows
the owner: /proc/net/tcp and tcp6 name the user of both ends (proc(5)). An established connection always leads to one
process, so one check before the first collective is enough, once all connections of the group exist. Nccl connects at
the first collective, and checks a random number that the ranks' store has passed on.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import torch.distributed as dist
from attrs import frozen

from dsl.errors import TransientError
from dsl.stage import RENDEZVOUS

ESTABLISHED, CONNECTS, LISTENS = "01", "02", "0A"
NO_INODE = "0"  # of an end without a process: not yet accepted, or closed; its user is meaningless
# A rank on a busy machine may need a while to accept a connection.
KNOWN_WITHIN_S = 30.0
LOOK_AGAIN_S = 0.05


@frozen
class Endpoint:
    address: IPv4Address | IPv6Address
    port: int


@frozen
class Socket:
    """A TCP socket of this machine that a process owns."""

    local: Endpoint
    remote: Endpoint
    state: str
    user: int


@contextmanager
def own_peers() -> Iterator[list[dist.ProcessGroup]]:
    """Open a context that checks that new connections between ranks on one host lead to this user's processes.

    Yields a list. Add to it the process groups created inside, except that of all ranks; those of gloo must be
    connected to all of their ranks at the end. Only the loopback interface is checked. Raises TransientError for a
    connection to another or an unknown user, and DistNetworkError for a broken or missing one.
    """
    groups: list[dist.ProcessGroup] = []
    if RENDEZVOUS not in os.environ:
        yield groups
        return
    before, world = _own(), dist.group.WORLD
    yield groups
    # A mesh may use the group of all ranks again.
    made = {group for group in (*groups, dist.group.WORLD) if group is not None and group is not world}
    wanted = sum(group.size() - 1 for group in made if "gloo" in dist.get_backend(group))
    give_up = time.monotonic() + KNOWN_WITHIN_S
    while unknown := _with_unknown_ends(before, wanted):
        if time.monotonic() > give_up:
            raise TransientError(
                f"the owner of the process at this rank's port {unknown[0].remote.port} was not found within "
                f"{KNOWN_WITHIN_S:.0f} s; nothing was received from it"
            )
        time.sleep(LOOK_AGAIN_S)


def _with_unknown_ends(before: set[str], wanted: int) -> list[Socket]:
    """New loopback connections (inodes not in `before`) whose other end has an unknown owner.

    All others lead to this user.
    """
    sockets = _sockets()
    users = {(socket.local, socket.remote): socket.user for socket in sockets.values()}
    new = [sockets[inode] for inode in (_own() - before) & sockets.keys()]
    # Another user can connect to 127.0.0.1 from any address of the machine: one end is enough.
    local = [socket for socket in new if socket.local.address.is_loopback or socket.remote.address.is_loopback]
    connected = [socket for socket in local if socket.state == ESTABLISHED]
    unknown = []
    for socket in connected:
        user = users.get((socket.remote, socket.local))
        if user is None:
            unknown.append(socket)
        elif user != socket.user:
            raise TransientError(
                f"a process of another user (id {user}) connected to this rank in place of another rank; end "
                "that process, or contact that user"
            )
    if any(socket.state not in (ESTABLISHED, CONNECTS, LISTENS) for socket in local):
        raise dist.DistNetworkError("the connection to another rank broke: that rank has ended")
    if len(connected) < wanted:
        raise dist.DistNetworkError(
            f"this rank has {len(connected)} of {wanted} connections to the other ranks: they have ended, or "
            "TORCH_GLOO_LAZY_INIT was set, which ranks of one host must not use"
        )
    return unknown


def _own() -> set[str]:
    """The inodes of this process's sockets."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own descriptor, and those that other threads close
            kind, _, inode = str(descriptor.readlink()).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _sockets() -> dict[str, Socket]:
    """All TCP sockets of this machine that a process owns, by inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] != NO_INODE:
                    found[fields[9]] = Socket(_endpoint(fields[1]), _endpoint(fields[2]), fields[3], int(fields[7]))
    return found


def _endpoint(text: str) -> Endpoint:
    """Parse an address of the kernel's socket table, which has 32-bit numbers in native byte order.

    ::ffff:a.b.c.d, as an IPv6 socket shows it, becomes a.b.c.d, as the IPv4 socket at the other end shows it.
    """
    number, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(number[at : at + 8], 16)) for at in range(0, len(number), 8))
    if len(packed) == 4:
        return Endpoint(IPv4Address(packed), int(port, 16))
    address = IPv6Address(packed)
    return Endpoint(address.ipv4_mapped or address, int(port, 16))
