"""SGLang in a process of dflow's: nothing of it listens beyond the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_cases import FAMILIES, make_samples, make_target, processor_of, write_tokens
from capture_worker import write_job
from import_graph import SUPPORTS
from sockets import Listener, interfaces_to_others, listeners, tree
from toy_ops import Toy, wait_for

from ops.lib.sglang.runtime import SglangRuntime

TESTS = Path(__file__).resolve().parents[1]
# Declaration and run function are two files, since a run loads the declarations without torch.
OPS = '''
from attrs import frozen
from dsl.op import Artifact, op

@frozen
class Text(Artifact):
    """text.txt"""

@op(version=1, run="sharing_run:share")
@frozen(kw_only=True)
class Share:
    """The ranks capture, and stop after a shard until a file `end` is there."""
    output = Text
'''
RUN = """
import time
from pathlib import Path
from capture_worker import capture
from fake_stage import FakeStage

HERE = Path(__file__).parent

class Waiting(FakeStage):
    def progress(self, done, total):
        if done and not (HERE / "captured").exists():
            (HERE / "captured").touch()
            while not (HERE / "end").exists():
                time.sleep(0.05)

def share(config, stage):
    capture(HERE / "job.json", Waiting, stage.rank, stage.world_size)
    if stage.rank == 0:
        (stage.out_dir / "text.txt").write_text("captured")
"""
PIPELINE = """
[pipeline]
name = "sharing"
ops = ["sharing.py"]

[node.r]
op = "share"
launch = { kind = "ranks", nproc = 2, threads = 1 }
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target("qwen3", tmp_path_factory.mktemp("target"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def interface() -> dict[str, str]:
    """What a user's environment may name: another interface for gloo, and a meeting place that is not dflow's."""
    others = list(interfaces_to_others())
    return {"MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "29500", **({"GLOO_SOCKET_IFNAME": others[0]} if others else {})}


def beyond(found: list[Listener]) -> list[Listener]:
    return [socket for socket in found if not socket.address.is_loopback]


def test_one_process_listens_on_the_loopback_interface_alone_and_its_environment_comes_back(
    target, interface, monkeypatch
):
    for name, value in interface.items():
        monkeypatch.setenv(name, value)
    kept = {name: os.environ.get(name) for name in (*interface, "NCCL_SOCKET_IFNAME")}
    before = listeners([os.getpid()])
    for _ in range(2):
        with SglangRuntime.start(
            target.path / "model", device="cpu", dtype="float32", pool_tokens=512, context_length=200
        ):
            found = [socket for socket in listeners([os.getpid()]) if socket not in before]
            assert found  # gloo
            assert [] == beyond(found)
            assert "=lo" == os.environ["NCCL_SOCKET_IFNAME"]
        assert kept == {name: os.environ.get(name) for name in kept}


@pytest.fixture
def sharing(target, interface, tmp_path) -> Iterator[tuple[Toy, list[Listener]]]:
    """A stage whose two ranks share a model of SGLang's, after a shard; the sockets of the command and its children."""
    processor = processor_of(target)
    samples = list(make_samples(processor, FAMILIES["qwen3"]).values())
    tokens = write_tokens(tmp_path / "tokens", target, processor, samples)
    options = {"splits": ["train"], "shard_tokens": 64, "backend": "sglang", "tp_degree": 2}
    write_job(tmp_path / "job.json", tmp_path / "stage", tokens, target, **options)
    (tmp_path / "sharing.py").write_text(OPS)
    (tmp_path / "sharing_run.py").write_text(RUN)
    toy = Toy(tmp_path, PIPELINE)
    paths = [
        *map(str, (TESTS / "sglang", *SUPPORTS, TESTS.parent)),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    # On a CPU SGLang wants to be told the cores where it has more ranks than the machine has NUMA nodes.
    variables = {**interface, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    process = toy.start("run", str(toy.file), **variables)
    try:
        wait_for(lambda: process.poll() is not None or (tmp_path / "captured").exists(), seconds=180)
        assert process.poll() is None, process.communicate()
        yield toy, listeners(tree(process.pid))
    finally:
        (tmp_path / "end").touch()
        process.communicate(timeout=120)


def test_two_ranks_that_share_a_model_listen_on_the_loopback_interface_alone(sharing):
    toy, found = sharing
    assert 2 == len({socket.pid for socket in found})  # gloo, of each rank
    assert [] == beyond(found)
    (toy.folder / "end").touch()
    wait_for(lambda: toy.state()["nodes"]["r"]["state"] not in ("pending", "running"))
    assert "captured" == toy.text("r")
