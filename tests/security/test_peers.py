"""Who may be on the other end of a rank's connections: processes of its own user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist
from sockets import listeners
from toy_ops import wait_for

from dsl.stage import RENDEZVOUS
from ops.training.peers import own_peers

NOBODY = 65534
# One of two ranks.
RANK = """
import os, sys
from pathlib import Path
from dsl.errors import TransientError
from fake_stage import FakeStage
from ops.training.ranks import joined

try:
    with joined(FakeStage(Path(sys.argv[1]), rank=int(sys.argv[2]), world_size=2)):
        print("joined", flush=True)
except TransientError as error:
    print(error, flush=True)
os._exit(0)
"""
# As another user: takes every small number, each by a connection of its own.
STRANGER = """
import os, socket, struct, sys

os.setgid(NOBODY)
os.setuid(NOBODY)
connections = []
for number in range(4):
    connections.append(socket.socket())
    connections[-1].connect(("127.0.0.1", int(sys.argv[1])))
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
        with pytest.raises(dist.DistNetworkError, match="it has ended"), own_peers():
            client, server = connected(listener)
            client.close()
        server.close()


def test_what_was_connected_before_is_not_looked_at(on_one_host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client, server = connected(listener)
        client.close()
        with server, own_peers():
            assert b"" == server.recv(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_process_of_another_user_that_takes_a_ranks_place_is_refused_before_anything_is_received(tmp_path):
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "ops")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {RENDEZVOUS: str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}

    pipe = subprocess.PIPE
    with ExitStack() as ending:

        def start(program: str, *arguments: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", program, *map(str, arguments)]
            process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
            ending.callback(process.communicate)
            ending.callback(process.kill)
            return process

        first = start(RANK, tmp_path, 0)
        wait_for(lambda: first.poll() is not None or listeners([first.pid]))
        [listener] = listeners([first.pid])
        stranger = start(STRANGER.replace("NOBODY", str(NOBODY)), listener.port)
        assert "connected\n" == stranger.stdout.readline()
        start(RANK, tmp_path, 1)
        said = first.stdout.readline()
    assert said.startswith(f"a process of another user (id {NOBODY}) connected to this rank")
