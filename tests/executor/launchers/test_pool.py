"""Workers of a pool beside the ranks of a stage: started again when killed, ended with the ranks, never left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from toy_ops import Toy

from executor.launchers.failure import first_failed
from executor.launchers.stage_contract import RankError, RankExit, RankResult

OPS = '''
from attrs import frozen
from dsl.op import Artifact, field, op

@frozen
class Text(Artifact):
    """text.txt"""

@op(version=1, run="pooled_run:pooled", pool=True, resumable=True)
@frozen(kw_only=True)
class Pooled:
    """Ranks that send orders to workers."""
    orders: tuple[str, ...] = field(help="what rank 0 sends, in order, to any worker")
    output = Text

@op(version=1, run="pooled_run:pooled")
@frozen(kw_only=True)
class Unpooled:
    """No pool."""
    output = Text
'''
# A worker answers an order with its name; the orders are how it dies.
RUN = """
import os, signal, time
from pathlib import Path
from dsl.errors import DataError, StopRequested
from ops.lib.stream.rendezvous import announced, connect, listen, report_hung

def pooled(config, stage):
    note = Path(__file__).parent / "pids" / str(os.getpid())
    note.write_text("rank" if stage.pool.worker is None else stage.pool.name)
    if stage.pool.worker is None:
        ask(config, stage)
    else:
        stage.log({"worker/wrong": 1.0}, 1)
        serve(stage)

def serve(stage):
    if os.environ.get("OMP_NUM_THREADS") != "3" or stage.world_size != 1:
        raise DataError("other threads")
    with listen(stage.pool) as listening:
        listening.settimeout(0.1)
        while not stage.stop_requested():
            try:
                connected, _ = listening.accept()
            except TimeoutError:
                continue
            with connected:
                order = connected.recv(100).decode()
                if order == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if order == "fail":
                    raise DataError("a shard is damaged")
                if order == "hang":
                    os.kill(os.getpid(), signal.SIGSTOP)
                connected.sendall(stage.pool.name.encode())

def ask(config, stage):
    done, answers = 0, []
    end = time.monotonic() + 120
    while done < len(config.orders) and time.monotonic() < end:
        if stage.stop_requested():
            raise StopRequested(f"after {done}")
        for name in announced(stage.pool):
            try:
                with connect(stage.pool, name) as connected:
                    connected.sendall(config.orders[done].encode())
                    if config.orders[done] == "hang":
                        report_hung(stage.pool, name)
                        done += 1
                        break
                    answer = connected.recv(100).decode()
            except OSError:
                continue
            done += 1
            answers += [answer] if answer else []
            break
        time.sleep(0.02)
    (stage.out_dir / "text.txt").write_text(" ".join(answers))
"""
PIPELINE = """
[pipeline]
name = "pool"
ops = ["pooled.py"]

[node.p]
op = "pooled"
orders = ORDERS
launch = { kind = "ranks", threads = 1, retries = RETRIES, pool = { workers = WORKERS, threads = 3 } }
"""


def toy_of(folder, orders, workers=1, retries=2) -> Toy:
    (folder / "pids").mkdir()
    (folder / "pooled.py").write_text(OPS)
    (folder / "pooled_run.py").write_text(RUN)
    text = PIPELINE.replace("ORDERS", json.dumps(orders))
    return Toy(folder, text.replace("RETRIES", str(retries)).replace("WORKERS", str(workers)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


CASES = {
    "killed": (["a", "kill", "b", "kill", "c"], 1, 2),
    "hung": (["hang", "a"], 1, 2),
    "one of two": (["kill", "a"], 2, 0),
    "all": (["kill", "kill", "a"], 2, 0),
    "own error": (["a", "fail", *["a"] * 10_000], 2, 2),
    "done before": (["a", "kill"], 1, 0),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The toy and the output of `dflow run` by case; all run at the same time."""
    toys = {name: toy_of(tmp_path_factory.mktemp("pool"), *case) for name, case in CASES.items()}
    processes = {name: toy.start("run", str(toy.file)) for name, toy in toys.items()}
    ended = {name: process.communicate(timeout=280) for name, process in processes.items()}
    return {name: (toy, "".join(ended[name])) for name, toy in toys.items()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("killed", ["0-0 0-1 0-2"]),
        ("hung", ["0-1"]),
        ("one of two", ["0-0", "1-0"]),
        ("done before", ["0-0"]),
    ],
)
def test_a_killed_or_hung_worker_is_started_again_and_the_stage_goes_on_without_one_that_is_not(runs, name, text):
    toy, output = runs[name]
    assert "done" == toy.state()["nodes"]["p"]["state"], output
    assert toy.text("p") in text


def test_the_stage_ends_when_no_worker_is_left_and_names_the_last_one(runs):
    node = runs["all"][0].state()["nodes"]["p"]
    assert "failed" == node["state"]
    assert "was killed (signal 9)" in node["failure"]["what"]
    assert node["failure"]["what"].startswith("pool worker ")
    assert "(rank 0 ended after it)" in node["failure"]["what"]


def test_a_workers_own_error_fails_the_stage_with_its_text_and_is_not_tried_again(runs):
    toy, output = runs["own error"]
    [what] = [toy.state()["nodes"]["p"]["failure"]["what"]]
    assert what.startswith("DataError (pool worker ")
    assert what.endswith("): a shard is damaged (rank 0 ended after it)")
    assert "fix the data" in output


def test_nothing_is_left_of_workers_when_the_last_rank_has_ended(runs):
    for toy, _ in runs.values():
        assert not [note.name for note in (toy.folder / "pids").iterdir() if is_running(int(note.name))]
        assert not list(toy.store.glob("work/*/private-*/*-*"))


def test_what_a_worker_logs_is_not_recorded(runs):
    toy, _ = runs["killed"]
    assert "worker/wrong" not in next(toy.store.glob("records/*/events.jsonl")).read_text()


def test_the_secret_of_an_attempt_is_in_no_file_and_no_command_line(tmp_path):
    toy = toy_of(tmp_path, ["a"] * 10_000)
    process = toy.start("run", str(toy.file))
    secret, end = "", time.monotonic() + 240
    while not secret and time.monotonic() < end:
        for note in (tmp_path / "pids").iterdir():
            try:
                environment = Path(f"/proc/{note.name}/environ").read_bytes().decode()
                secret = environment.partition('"secret": "')[2][:64]
                commands = Path(f"/proc/{note.name}/cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if secret:
                assert secret not in commands
                break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert len(bytes.fromhex(secret)) == 32
    files = [file for file in toy.store.rglob("*") if file.is_file()]
    assert not [file for file in files if secret.encode() in file.read_bytes()]


def test_a_killed_run_leaves_no_worker_and_no_rank(tmp_path):
    toy = toy_of(tmp_path, ["a"] * 10_000, workers=2)
    process = toy.start("run", str(toy.file))
    end = time.monotonic() + 240
    while len(list((tmp_path / "pids").iterdir())) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    pids = [int(note.name) for note in (tmp_path / "pids").iterdir()]
    assert 3 == len(pids)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def test_a_worker_that_failed_is_named_by_its_number_in_the_pool():
    error = RankError(name="DataError", message="x", time=5.0, names=("dsl.errors.DataError",))
    lost = RankError(name="DistNetworkError", message="y", time=4.0, lost_connection=True)
    results = [RankResult(status="failed", error=lost), None, RankResult(status="failed", error=error)]
    found = first_failed(results, [RankExit(0, 1, 6.0), RankExit(2, 1, 6.0)], ranks=1)
    assert found is not None
    assert "DataError (pool worker 1): x (rank 0 ended after it)" == found.text


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("pool = { workers = 2 }", 'node.n.launch.pool: a pool works for ranks: set kind = "ranks"'),
        ('kind = "ray", pool = { workers = 2 }', "node.n.launch.pool: a pool is on one machine: "),
        ('kind = "ranks", pool = { workers = 0 }', "node.n.launch.pool.workers: must be >= 1, got 0"),
        ('kind = "ranks", pool = { threads = 2 }', 'node.n.launch.pool: the required key "workers" is missing'),
        ('kind = "ranks", pool = { workers = 1, memory = "much" }', "expected a number of bytes such as"),
        ('kind = "ranks", pool = { workers = 1 }', 'node.n.launch.pool: the op "unpooled" has no use for a pool'),
    ],
)
def test_a_wrong_pool_is_refused_by_plan_at_its_place(tmp_path, launch, expected):
    (tmp_path / "pooled.py").write_text(OPS)
    (tmp_path / "pooled_run.py").write_text(RUN)
    toy = Toy(
        tmp_path, f'[pipeline]\nname = "p"\nops = ["pooled.py"]\n[node.n]\nop = "unpooled"\nlaunch = {{ {launch} }}\n'
    )
    done = toy.dflow("plan", str(toy.file))
    assert done.returncode
    assert expected in done.stdout + done.stderr
