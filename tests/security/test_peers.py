"""Who may be on the other end of a rank's connections: processes of its own user."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from import_graph import PYTHON_PATH
from sockets import interfaces_to_others, listeners
from toy_ops import wait_for

from dsl.errors import TransientError
from dsl.stage import RENDEZVOUS
from ops.lib.training import peers
from ops.lib.training.peers import own_peers

NOBODY = 65534
SYN_SENT = 2  # of include/net/tcp_states.h
OTHERS = str(next(iter(interfaces_to_others().values()), ""))
BESIDE = pytest.mark.skipif(not OTHERS, reason="no interface but the loopback")
# One of two ranks.
RANK = """
import os, sys
from pathlib import Path
from dsl.errors import TransientError
from fake_stage import FakeStage
from ops.lib.training.rank_group import joined

try:
    with joined(FakeStage(Path(sys.argv[1]), rank=int(sys.argv[2]), world_size=2)):
        print("joined", flush=True)
except TransientError as error:
    print(error, flush=True)
os._exit(0)
"""
# One of two ranks, in whose environment gloo is to connect late; and then a group whose connections are made at once.
LATE = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from fake_stage import FakeStage
from ops.lib.training.peers import own_peers
from ops.lib.training.rank_group import joined

os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
try:
    with joined(FakeStage(Path(sys.argv[1]), rank=int(sys.argv[2]), world_size=2)):
        print("joined", flush=True)
except dist.DistNetworkError as error:
    print(error, flush=True)
for late in ("0", "1"):
    os.environ["TORCH_GLOO_LAZY_INIT"] = late
    try:
        with own_peers() as groups:
            groups.append(dist.new_group([0, 1]))
        print("connected", flush=True)
    except dist.DistNetworkError as error:
        print(error, flush=True)
sys.stdin.read()
os._exit(0)
"""
# As another user: takes every small number, each by a connection of its own.
STRANGER = """
import os, socket, struct, sys

os.setgid(NOBODY)
os.setuid(NOBODY)
port, family, source, *target = sys.argv[1:]
connections = []
for number in range(4):
    connections.append(socket.socket(socket.AddressFamily[family]))
    if source:
        connections[-1].bind((source, 0))
    connections[-1].connect((*target, int(port)))
    connections[-1].sendall(struct.pack("=q", number))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def on_one_host(monkeypatch, tmp_path):
    monkeypatch.setenv(RENDEZVOUS, str(tmp_path / "store"))


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    return client, listener.accept()[0]


def test_connections_between_processes_of_one_user_pass(on_one_host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with own_peers():
            client, server = connected(listener)
        with client, server:
            assert server.getsockname() == client.getpeername()


def test_a_connection_whose_other_end_has_closed_is_one_to_a_rank_that_ended(on_one_host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(dist.DistNetworkError, match="has ended"), own_peers():
            client, server = connected(listener)
            client.close()
        server.close()


def test_what_was_connected_before_is_not_looked_at(on_one_host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client, server = connected(listener)
        client.close()
        with server, own_peers():
            assert b"" == server.recv(1)


def test_another_threads_connection_that_is_still_being_made_is_none_to_a_rank(on_one_host):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as closing:
        closing.enter_context(socket.create_connection(listener.getsockname()))  # takes the only place in the queue
        with own_peers():
            late = closing.enter_context(socket.socket())
            late.setblocking(False)
            assert errno.EINPROGRESS == late.connect_ex(listener.getsockname())
        assert SYN_SENT == late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


@BESIDE
def test_a_connection_at_other_addresses_of_the_machine_is_none_to_a_rank(on_one_host):
    with socket.create_server((OTHERS, 0)) as listener:
        with own_peers():
            client, server = connected(listener)
            client.close()
        server.close()


def test_a_connection_that_is_not_accepted_yet_is_waited_for(on_one_host):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        begin = time.monotonic()
        with own_peers():
            client = socket.create_connection(listener.getsockname())
            server = thread.submit(lambda: (time.sleep(0.3), listener.accept()[0])[1])
        assert 0.3 <= time.monotonic() - begin
        with client, server.result():
            pass


def test_a_connection_whose_other_end_is_never_known_is_refused(on_one_host, monkeypatch):
    monkeypatch.setattr(peers, "KNOWN_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said = f"port {listener.getsockname()[1]} was not found within"
        with pytest.raises(TransientError, match=said), own_peers():
            client = socket.create_connection(listener.getsockname())
        client.close()


@pytest.fixture
def start():
    """Starts Python programs, each in a process of its own; kills them when the test ends."""
    pipe = subprocess.PIPE
    paths = [PYTHON_PATH]
    chosen = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with ExitStack() as ending:

        def started(program: str, *arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", program, *map(str, arguments)]
            environment = {**os.environ, **chosen}
            process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            ending.callback(process.communicate)
            ending.callback(process.kill)
            return process

        yield started


@pytest.fixture
def stranger(start):
    def connect(port: int, family: str, source: str, target: str) -> None:
        process = start(STRANGER.replace("NOBODY", str(NOBODY)), port, family, source, target)
        assert "connected\n" == process.stdout.readline()

    return connect


def test_ranks_of_one_host_are_connected_before_the_first_collective_or_refused(on_one_host, start, tmp_path):
    ranks = [start(LATE, tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        lines = [rank.stdout.readline() for _ in range(3)]
        assert "connected\n" == lines[1]
        for line in (lines[0], lines[2]):
            assert line.startswith("this rank has 0 of 1 connections to the other ranks: "), lines


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    ("family", "source", "target"),
    [
        ("AF_INET", "", "127.0.0.1"),
        ("AF_INET6", "", "::ffff:127.0.0.1"),
        pytest.param("AF_INET", "OTHERS", "127.0.0.1", marks=BESIDE),
        pytest.param("AF_INET6", "::ffff:OTHERS", "::ffff:127.0.0.1", marks=BESIDE),
    ],
)
def test_a_process_of_another_user_is_known_by_whatever_address_it_connects(
    on_one_host, stranger, family, source, target
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(TransientError, match=rf"another user \(id {NOBODY}\)"), own_peers():
            stranger(listener.getsockname()[1], family, source.replace("OTHERS", OTHERS), target)
            accepted = [listener.accept()[0] for _ in range(4)]
        for connection in accepted:
            connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(("family", "target"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::ffff:127.0.0.1")])
def test_a_process_of_another_user_that_takes_a_ranks_place_is_refused_before_anything_is_received(
    on_one_host, start, stranger, tmp_path, family, target
):
    first = start(RANK, tmp_path, 0)
    wait_for(lambda: first.poll() is not None or listeners([first.pid]))
    [listener] = listeners([first.pid])
    stranger(listener.port, family, "", target)
    start(RANK, tmp_path, 1)
    assert first.stdout.readline().startswith(f"a process of another user (id {NOBODY}) connected to this rank")
