"""The sockets of processes as /proc shows them."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from attrs import frozen

LISTENS = "0A"
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, see netdevice(7)


@frozen
class Listener:
    """A TCP socket that listens. address: the one that it was bound to."""

    pid: int
    address: IPv4Address | IPv6Address
    port: int


def tree(root: int) -> list[int]:
    """A process and all its live descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Every TCP socket, of IPv4 and IPv6, at which these processes listen."""
    rows = {}
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS:
                rows[f"socket:[{fields[9]}]"] = _endpoint(fields[1])
    return [Listener(pid, *rows[link]) for pid in pids for link in sorted(_links(pid) & rows.keys())]


def _links(pid: int) -> set[str]:
    """The targets of a process's open descriptors, as /proc shows them; those closed meanwhile are left out."""
    found = set()
    with suppress(FileNotFoundError):  # it ended just now
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.add(str(descriptor.readlink()))
    return found


def _endpoint(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Parse `address:port` of /proc/net/tcp: hexadecimal; the address in 32-bit words of the machine's byte order."""
    address, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
    return (IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)), int(port, 16)


def interfaces_to_others() -> dict[str, IPv4Address]:
    """The IPv4 address of each network interface by its name, without the loopback."""
    found = {}
    with socket.socket() as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                address = IPv4Address(answer[20:24])
                if not address.is_loopback:
                    found[name] = address
    return found
