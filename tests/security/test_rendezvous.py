"""Ranks of one host: nothing of theirs listens beyond the loopback interface, or unpickles what strangers send."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen
from sockets import Listener, interfaces_to_others, listeners, tree
from toy_ops import Toy, wait_for

# Declaration and run function are two files, since a run loads the declarations without torch.
OPS = '''
from attrs import frozen
from dsl.op import Artifact, op

@frozen
class Text(Artifact):
    """text.txt"""

@op(version=1, run="talking_run:talk")
@frozen(kw_only=True)
class Talk:
    """The ranks send each other objects until a file `end` is there."""
    output = Text
'''
RUN = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from ops.lib.training.peers import own_peers
from ops.lib.training.rank_group import any_rank, collected, joined

HERE = Path(__file__).parent

def talk(config, stage):
    with joined(stage):
        with own_peers() as groups:
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
            groups += mesh.get_all_groups()
        dist.all_reduce(torch.ones(1), group=mesh.get_group("sp"))
        while not any_rank((HERE / "end").exists(), torch.device("cpu")):
            said = collected(f"rank {stage.rank}")
            (HERE / f"rank-{stage.rank}").write_text(str(os.getpid()))
            time.sleep(0.05)
        if stage.rank == 0:
            (stage.out_dir / "text.txt").write_text(" ".join(said))
"""
PIPELINE = """
[pipeline]
name = "talking"
ops = ["talking.py"]

[node.r]
op = "talk"
launch = { kind = "ranks", nproc = 2, threads = 1 }
"""
STORES_READ_EVERY_S = 5.0  # torch's elastic agents, by their keep-alive


@frozen
class Talking:
    """A stage in the middle. listening: the sockets of the command and all that it started; pids: of the ranks."""

    toy: Toy
    listening: list[Listener]
    pids: list[int]


@pytest.fixture(scope="module")
def talking(tmp_path_factory) -> Iterator[Talking]:
    """The user's environment names another interface for gloo, a meeting place that is not dflow's, and connections
    that are made only when they are used."""
    folder = tmp_path_factory.mktemp("talking")
    (folder / "talking.py").write_text(OPS)
    (folder / "talking_run.py").write_text(RUN)
    toy = Toy(folder, PIPELINE)
    chosen = {"MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "29500", "TORCH_GLOO_LAZY_INIT": "1"}
    for name in interfaces_to_others():
        chosen["GLOO_SOCKET_IFNAME"] = name
    process = toy.start("run", str(toy.file), **chosen)
    try:
        files = [folder / f"rank-{rank}" for rank in range(2)]
        wait_for(lambda: process.poll() is not None or all(file.exists() and file.read_text() for file in files))
        assert process.poll() is None, process.communicate()
        yield Talking(toy, listeners(tree(process.pid)), [int(file.read_text()) for file in files])
    finally:
        (folder / "end").touch()
        process.communicate(timeout=120)


def test_nothing_of_a_stage_with_two_ranks_listens_beyond_the_loopback_interface(talking):
    assert set(talking.pids) == {socket.pid for socket in talking.listening}  # gloo, of each rank
    assert [] == [socket for socket in talking.listening if not socket.address.is_loopback]
    for pid in talking.pids:
        variables = dict(
            line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line
        )
        assert ("lo", "=lo") == (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"])
        assert {"MASTER_ADDR", "MASTER_PORT"}.isdisjoint(variables)


def test_the_file_in_which_ranks_meet_is_closed_to_other_users(talking):
    [file] = talking.toy.store.glob("work/*/private-*/store")
    assert (0o700, os.getuid()) == (stat.S_IMODE(file.parent.stat().st_mode), file.parent.stat().st_uid)


def test_what_a_stranger_writes_to_the_sockets_of_a_stage_is_never_unpickled(talking, tmp_path):
    canary = tmp_path / "canary"
    hosts = ["127.0.0.1" if socket.address.is_unspecified else socket.address for socket in talking.listening]
    places = [f"{host}:{socket.port}" for host, socket in zip(hosts, talking.listening, strict=True)]
    stranger = [sys.executable, str(Path(__file__).with_name("stranger.py")), str(canary), *places]
    written = subprocess.run(stranger, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    end = time.monotonic() + (2 * STORES_READ_EVERY_S if written else 1.0)
    while not canary.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (False, []) == (canary.exists(), written)
    (talking.toy.folder / "end").touch()
    wait_for(lambda: talking.toy.state()["nodes"]["r"]["state"] not in ("pending", "running"))
    assert "rank 0 rank 1" == talking.toy.text("r")
