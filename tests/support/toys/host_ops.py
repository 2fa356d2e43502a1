"""Ops whose ranks run on several hosts, for tests with several nodes of a Ray cluster on one machine."""

from pathlib import Path

from toy_ops import Toy

# Declaration and run function are two files, since a run loads the declarations without torch.
OPS = '''
from attrs import frozen
from dsl.op import Artifact, field, op

@frozen
class Text(Artifact):
    """text.txt"""

@op(version=1, run="hosts_run:wait", resumable=True)
@frozen(kw_only=True)
class Wait:
    """Every rank says that it is there; then they wait, or not."""
    how: str = field(default="go", neutral=True, help="go or wait")
    output = Text

@op(version=1, run="hosts_sum:add")
@frozen(kw_only=True)
class Add:
    """Adds up the ranks' numbers; the last rank may fail instead."""
    how: str = field(default="go", neutral=True, help="go or fail")
    token: str = field(default="", help="is printed")
    output = Text

@op(version=1, run="hosts_shards:make", resumable=True, shares_shards=True)
@frozen(kw_only=True)
class Shards:
    """Twelve shards; worker 0 may wait in its first."""
    how: str = field(default="go", neutral=True, help="go or wait")
    output = Text
'''
WAIT = """
import os, time
from pathlib import Path
from dsl.errors import StopRequested

HERE = Path(__file__).parent

def wait(config, stage):
    print(f"rank {stage.rank} sees GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')!r}", flush=True)
    (HERE / f"rank-{stage.rank}.pid").write_text(str(os.getpid()))
    while config.how == "wait":
        if stage.stop_requested():
            (stage.work_dir / f"saved-{stage.rank}").touch()
            raise StopRequested("saved")
        time.sleep(0.05)
    if stage.rank == 0:
        saved = sorted(path.name for path in stage.work_dir.iterdir())
        (stage.out_dir / "text.txt").write_text(f"{stage.world_size} ranks {saved}")
"""
SUM = """
import torch
import torch.distributed as dist

def add(config, stage):
    print(f"rank {stage.rank} got {config.token}", flush=True)
    dist.init_process_group("gloo")
    number = torch.tensor(stage.rank + 1)
    if config.how == "fail" and stage.rank == stage.world_size - 1:
        broken(number)
    dist.all_reduce(number)
    if stage.rank == 0:
        (stage.out_dir / "text.txt").write_text(f"{number.item()} of {stage.world_size} ranks")
    dist.barrier()
    dist.destroy_process_group()

def broken(number):
    raise ValueError(f"a bug at {number.item()}")
"""
SHARDS = """
import os, time
from pathlib import Path
from ops.lib.data.shared_shards import SharedShards, partial_path, publish, waited

HERE = Path(__file__).parent

def make(config, stage):
    shared = SharedShards(stage)
    paths = [stage.work_dir / f"{number:04d}.txt" for number in range(12)]
    while config.how == "wait" and stage.worker and not (HERE / "rank-0.pid").exists():
        time.sleep(0.05)
    for path in waited(shared.claimed(lambda: paths, lambda path: path), stage.stop_requested):
        (HERE / f"rank-{stage.worker}.pid").write_text(str(os.getpid()))
        while config.how == "wait" and stage.worker == 0:
            time.sleep(0.05)
        partial = partial_path(path, stage.worker)
        partial.write_text(path.stem)
        publish(partial, path)
    shared.write_artifact(lambda: (stage.out_dir / "text.txt").write_text(" ".join(p.read_text() for p in paths)))
"""
PIPELINE = """
[pipeline]
name = "hosts"
ops = ["hosts.py"]

[node.r]
op = "OP"
launch = { kind = "ray", hosts = 2, threads = 1, device = "cpu", retries = 0 }
"""


def hosts_toy(folder: Path, op: str) -> Toy:
    toy = Toy(folder, PIPELINE.replace("OP", op))
    for name, text in (("hosts.py", OPS), ("hosts_run.py", WAIT), ("hosts_sum.py", SUM), ("hosts_shards.py", SHARDS)):
        (folder / name).write_text(text)
    return toy


def ranks(toy: Toy, count: int = 2) -> list[int]:
    """The process ids of the ranks, once all of them have begun; each id is returned once."""
    paths = [toy.folder / f"rank-{rank}.pid" for rank in range(count)]
    if not all(path.exists() and path.read_text() for path in paths):
        return []
    pids = [int(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return pids
