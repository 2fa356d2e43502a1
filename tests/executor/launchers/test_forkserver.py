"""Stages are forked by a process that never imported torch, and find what a fresh interpreter would."""

import json

import psutil
import pytest
from side_ops import side
from toy_ops import Toy, wait_for

from executor.launchers.forkserver_client import Children
from executor.launchers.stage_contract import LIFE_LINE
from executor.launchers.stage_environment import stage_environment
from executor.launchers.worker import EXECUTOR_GONE
from executor.system.stage_mark import STAGE

LOOK = '[node.a]\nop = "look"\nlaunch = { threads = 1 }\n'


def look(toy):
    return json.loads(toy.text("a"))


def test_the_forkserver_has_neither_torch_nor_the_users_ops_nor_run_modules(tmp_path):
    toy = side(tmp_path, LOOK)
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0, result.stderr
    found = look(toy)
    assert found["parent"] == ["-m", "executor.launchers.forkserver"]
    assert not found["parent_maps"]
    # What the stage has beside its own op file, it has from the forkserver.
    loaded = found["modules"]
    assert "executor.launchers.worker" in loaded
    assert not {"torch", "numpy", "mlflow", "transformers", "rich"} & set(loaded)
    assert [name for name in loaded if name.startswith("ops.")] == []


def test_a_stage_finds_what_a_fresh_interpreter_would_and_nothing_of_the_executor(tmp_path):
    toy = side(tmp_path, LOOK)
    result = toy.dflow("run", str(toy.file), DFLOW_FAIL_AT="nowhere")
    assert result.returncode == 0, result.stderr
    found = look(toy)
    assert (found["group"], found["hash_seed"], found["threads"], found["fail_at"]) == (True, "0", "1", "nowhere")
    kinds = {path.rpartition("/")[2].partition("-")[0].partition(":")[0] for path in found["open"]}
    assert kinds == {
        "null",
        "a.log",
        "ranks",
        "alive",
        "pipe",
    }  # its log, its own lock, the life line, its wake-up pipe
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


@pytest.fixture
def children():
    made = Children(stage_environment(1))
    yield made
    made.close()


def start(children, tmp_path, **variables):
    """The process id of a stage, which finds no job and ends."""
    environment = {**stage_environment(1), STAGE: "a mark", LIFE_LINE: "its own", **variables}
    stage = children.start("executor.launchers.worker", [str(tmp_path / "job"), "0"], environment, tmp_path / "log")
    wait_for(lambda: stage.pid is not None)
    assert EXECUTOR_GONE == stage.wait()
    return stage.pid


def spare(children, *libraries):
    """The process that waits, once it has imported these libraries."""
    children.prepare(stage_environment(1), libraries)
    server = next(each for each in psutil.Process().children() if "executor.launchers.forkserver" in each.cmdline())
    wait_for(lambda: any("_csv" in map.path for each in server.children() for map in each.memory_maps()))
    (found,) = (each for each in server.children() if any("_csv" in map.path for map in each.memory_maps()))
    return found


def test_a_spare_with_its_libraries_becomes_the_next_stage_of_its_environment(children, tmp_path):
    start(children, tmp_path)
    waits = spare(children, "_csv", "no_such_library")
    assert waits.pid == spare(children, "_csv").pid, "the same environment again is the same spare"
    assert waits.pid == start(children, tmp_path)
    assert waits.pid != start(children, tmp_path)


@pytest.mark.parametrize("dropped", ["other threads", "killed"])
def test_a_spare_that_does_not_fit_is_ended_and_the_stage_starts_without_it(children, tmp_path, dropped):
    start(children, tmp_path)
    waits = spare(children, "_csv")
    if dropped == "killed":
        waits.kill()
        wait_for(lambda: waits.status() == psutil.STATUS_ZOMBIE)
    assert start(children, tmp_path, OMP_NUM_THREADS="2") != waits.pid
    wait_for(lambda: not waits.is_running())


def test_a_spare_ends_with_the_forkserver(children, tmp_path):
    start(children, tmp_path)
    waits = spare(children, "_csv")
    waits.parent().kill()
    wait_for(lambda: not waits.is_running() or waits.status() == psutil.STATUS_ZOMBIE)
