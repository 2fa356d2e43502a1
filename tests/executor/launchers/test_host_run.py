"""A stage is a process of its own, started ahead of its turn or not, and finds what a fresh interpreter would."""

import json

import psutil
import pytest
from side_ops import side
from toy_ops import Toy, wait_for

from dsl.launch import Launch, Machine
from executor.launchers.backend import HostExit, StageOrder
from executor.launchers.backends import LocalBackend
from executor.launchers.host_run import HostRun, WaitingWorker, stage_environment
from executor.launchers.worker import EXECUTOR_GONE
from executor.system.resource_pool import Demand, Share

LOOK = '[node.a]\nop = "look"\nlaunch = { threads = 1 }\n'


def look(toy):
    return json.loads(toy.text("a"))


def test_a_stage_has_neither_torch_nor_dflows_ops_nor_what_the_executor_imported(tmp_path):
    toy = side(tmp_path, LOOK)
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0, result.stderr
    loaded = look(toy)["modules"]
    assert "executor.launchers.worker" not in loaded, "it is the main module"
    assert not {"torch", "numpy", "mlflow", "transformers", "rich"} & set(loaded)
    assert [name for name in loaded if name.startswith("ops.")] == []


def test_a_stage_finds_what_a_fresh_interpreter_would_and_nothing_of_the_executor(tmp_path):
    toy = side(tmp_path, LOOK)
    result = toy.dflow("run", str(toy.file), DFLOW_FAIL_AT="nowhere")
    assert result.returncode == 0, result.stderr
    found = look(toy)
    assert (found["group"], found["hash_seed"], found["threads"], found["fail_at"]) == (True, "0", "1", "nowhere")
    kinds = {path.rpartition("/")[2].partition("-")[0].partition(":")[0] for path in found["open"]}
    assert kinds == {"null", "a.log", "ranks", "pipe"}  # its log, its own lock, its wake-up pipe
    assert sum(path.startswith("pipe") for path in found["open"]) == 2


def test_two_nodes_of_one_key_are_computed_once(tmp_path):
    toy = side(tmp_path, "[machine]\ncpus = 2\n" + LOOK + LOOK.replace("node.a", "node.b"))
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, toy.state()["nodes"]["b"]["cache"]) == (0, "hit")
    assert "waiting" not in result.stdout


def test_an_op_may_use_worker_processes(tmp_path):
    toy = side(tmp_path, '[node.a]\nop = "spawn"\n')
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, toy.text("a")) == (0, "[4, 9]"), result.stderr


def test_a_stage_tells_the_memory_that_it_took(tmp_path):
    toy = Toy(tmp_path)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    state = toy.state()["nodes"]["a"]
    assert 2**20 < state["memory"] < 2**32
    assert state.get("gpu_memory") is None


def test_the_value_of_a_secret_reaches_the_op_and_no_file(tmp_path):
    toy = side(tmp_path, LOOK.replace("launch", 'token = "${secret:TOY_TOKEN}"\nlaunch'))
    result = toy.dflow("run", str(toy.file), TOY_TOKEN="s3cr3t-value")
    assert result.returncode == 0, result.stderr
    log = next(toy.store.glob("records/*/a.log")).read_text()
    assert log == "the token is ***\na child says ***\n"
    for path in toy.folder.rglob("*"):
        assert not path.is_file() or b"s3cr3t-value" not in path.read_bytes(), path


def test_the_error_of_a_node_with_a_secret_tells_not_its_value(tmp_path):
    toy = side(tmp_path, LOOK.replace("launch", 'token = "${secret:TOY_TOKEN}"\nlaunch'))
    result = toy.dflow("run", str(toy.file), TOY_TOKEN="wrong")
    assert result.returncode == 1
    assert "a failed: DataError: *** is refused" in result.stderr
    assert "wrong" not in result.stderr + result.stdout + next(toy.store.glob("records/*/events.jsonl")).read_text()


def waits(node, *libraries, **variables):
    """A worker that waits for a node, once it has imported these libraries."""
    worker = WaitingWorker(node, {**stage_environment(1), **variables}, libraries)
    wait_for(lambda: any("_csv" in map.path for map in psutil.Process(worker.child.pid).memory_maps()))
    return worker


@pytest.fixture
def order(tmp_path):
    """The order of a stage that finds no job, and ends."""
    for name in ("results", "private"):
        (tmp_path / name).mkdir()
    paths = {name: tmp_path / name for name in ("job", "results", "events", "private", "log")}
    return StageOrder(
        node="n",
        job_digest="0",
        attempt=1,
        folder=tmp_path,
        directory=tmp_path,
        launch=Launch(),
        share=Share(1),
        part=Demand(1),
        **paths,
    )


def pid_of(order, waiting):
    run = HostRun(order, None, waiting=waiting)
    assert run.wait(None) == HostExit(code=EXECUTOR_GONE)
    waiting.close()
    return run.pid


def test_a_worker_that_waits_with_its_libraries_becomes_the_stage_of_its_node(order):
    waiting = waits("n", "no_such_library", "_csv")
    assert pid_of(order, waiting) == waiting.child.pid


@pytest.mark.parametrize("why", ["other node", "other threads", "killed"])
def test_a_worker_that_does_not_fit_is_ended_and_the_stage_starts_without_it(order, why):
    variables = {"OMP_NUM_THREADS": "2"} if why == "other threads" else {}
    waiting = waits("m" if why == "other node" else "n", "_csv", **variables)
    process = psutil.Process(waiting.child.pid)
    if why == "killed":
        process.kill()
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert pid_of(order, waiting) != waiting.child.pid
    assert not process.is_running()


def ahead() -> list[int]:
    """The workers of this process that wait."""
    children = psutil.Process().children()
    wait_for(lambda: all(each.cmdline() for each in children))  # empty for a moment after exec
    return [each.pid for each in children if "--ahead" in each.cmdline()]


def test_at_most_one_worker_waits_and_it_ends_with_the_run():
    backend = LocalBackend(Machine())
    pids = []
    for node, threads in (("a", 1), ("a", 1), ("a", 2), ("b", 2)):
        backend.prepare(node, Share(threads), [])
        pids += ahead()
    backend.close()
    assert len(pids) == 4
    assert pids[0] == pids[1]
    assert len({*pids}) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_waits_ends_when_its_socket_does():
    waiting = waits("n", "_csv")
    waiting._orders.close()
    assert waiting.child.ended_within(None)
    assert waiting.child.code == 0
