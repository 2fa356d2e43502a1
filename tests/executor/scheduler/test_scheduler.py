"""Independent nodes run side by side within what the run may use, and in a given order."""

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from side_ops import side
from toy_ops import ONLY_THE_LOOP, UNTRACKED, WITHOUT_USAGE, Toy, wait_for

from dsl.launch import Machine
from executor.system.resource_pool import Capacity, Demand, Free

ONE_CPU = "launch = { cpus = 1 }\n"


def meets(*names, launch=ONE_CPU):
    """Nodes of which each waits until all the others run too."""
    return "".join(
        f'[node.{name}]\nop = "meet"\nname = "{name}"\n'
        f"others = {json.dumps([other for other in names if other != name])}\n{launch}"
        for name in names
    )


def alone(*names, launch=""):
    return "".join(f'[node.{name}]\nop = "alone"\nname = "{name}"\n{launch}' for name in names)


def test_nodes_that_fit_together_run_side_by_side(tmp_path):
    toy = side(tmp_path, "[machine]\ncpus = 3\n" + meets("a", "b", "c"))
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0, result.stderr
    started = [line.partition(":")[0] for line in result.stdout.splitlines() if ": started" in line]
    assert sorted(started) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("machine", "launch"),
    [
        ("", ""),  # what declares nothing takes the whole machine
        ("[machine]\ncpus = 3\n", "launch = { cpus = 2 }\n"),
        ("[machine]\ncpus = 9\nmemory = '3 GiB'\n", "launch = { cpus = 1, memory = '2 GiB' }\n"),
        ("[machine]\ncpus = 9\n", "launch = { cpus = 1, gpus = 1 }\n"),
    ],
    ids=["undeclared", "cpus", "memory", "gpus"],
)
def test_nodes_that_do_not_fit_together_run_one_after_the_other_in_the_order_of_the_graph(tmp_path, machine, launch):
    toy = side(tmp_path, machine + alone("c", "a", "b", launch=launch))
    result = toy.dflow("run", str(toy.file), CUDA_VISIBLE_DEVICES="7")
    assert result.returncode == 0, result.stderr
    assert [line[0] for line in result.stdout.splitlines() if ": started" in line] == ["c", "a", "b"]


def test_each_node_sees_the_gpus_that_it_was_given(tmp_path):
    nodes = "".join(
        f'[node.{name}]\nop = "gpus"\nname = "{name}"\nother = "{other}"\n{launch}'
        for name, other, launch in (("a", "b", ONE_CPU), ("b", "a", "launch = { cpus = 1, gpus = 2 }\n"))
    )
    toy = side(tmp_path, "[machine]\ncpus = 2\n" + nodes)
    result = toy.dflow("run", str(toy.file), CUDA_VISIBLE_DEVICES="3,10,GPU-ab,5")
    assert result.returncode == 0, result.stderr
    seen = {name: toy.text(name).split(",") for name in "ab"}
    assert sorted(map(len, seen.values())) == [1, 2]
    assert len({*seen["a"], *seen["b"]}) == 3
    assert {*seen["a"], *seen["b"]} <= {"3", "10", "GPU-ab", "5"}


def test_a_node_that_asks_for_more_than_there_is_is_refused_before_anything_runs(tmp_path):
    asked = 'launch = { cpus = 9999, gpus = 1, memory = "900000 TB" }\n'
    toy = side(tmp_path, meets("a") + alone("b", launch=asked))
    result = toy.dflow("run", str(toy.file), CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, toy.calls()) == (2, [])
    assert "node.b.launch.cpus: needs 9999 CPUs, but the run may use only " in result.stderr
    assert "node.b.launch.gpus: needs 1 GPU, but the run may use only 0 GPUs" in result.stderr
    assert "node.b.launch.memory: needs 900,000.0 TB, but the run may use only " in result.stderr
    assert not list(toy.store.glob("records/*"))


def test_a_node_that_another_run_works_on_keeps_the_others_waiting_for_nothing(tmp_path):
    toy = side(tmp_path, '[node.a]\nop = "meet"\nname = "a"\nothers = ["b"]\n')
    first = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "a.here").exists())
    both = tmp_path / "both.toml"
    both.write_text(toy.file.read_text() + '[node.b]\nop = "meet"\nname = "b"\n')
    result = toy.dflow("run", str(both))  # a can only end after b ran
    _, errors = first.communicate(timeout=300)
    assert (first.returncode, result.returncode) == (0, 0), errors + result.stderr
    assert "a: waiting, process" in result.stdout
    assert sorted(toy.calls()) == ["a", "b"]
    assert "a: cached" in result.stdout


def test_ctrl_c_asks_every_stage_to_save_and_the_run_ends_as_stopped(tmp_path):
    waiting = meets("a", "b").replace('"b"]', '"b", "never"]').replace('["a"]', '["a", "never"]')
    toy = side(tmp_path, "[machine]\ncpus = 2\n" + waiting)
    process = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "a.here").exists() and (tmp_path / "b.here").exists())
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert toy.state()["status"] == "stopped"
    assert [toy.state()["nodes"][name]["state"] for name in "ab"] == ["pending", "pending"]
    assert all(f"{name}: stopping" in out for name in "ab")


def test_a_second_ctrl_c_kills_all_stages_at_once(tmp_path):
    toy = side(tmp_path, "[machine]\ncpus = 2\n" + meets("a", "b").replace('"]\n', '", "never"]\n'))
    file = tmp_path / "toy.py"
    file.write_text(
        file.read_text().replace('if stage.stop_requested():\n            raise StopRequested("saved")', "")
    )
    process = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "a.here").exists() and (tmp_path / "b.here").exists())
    process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(toy.store.glob("work/*/results-*/stop"))) == 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert toy.state()["status"] == "stopped"


def test_only_the_loop_reads_and_writes_the_state_of_the_record_and_what_stages_use_becomes_events(tmp_path):
    toy = side(tmp_path, "[machine]\ncpus = 2\n" + meets("a", "b").replace('["a"]', '["a", "go"]'))
    process = toy.start("run", str(toy.file), program=ONLY_THE_LOOP + UNTRACKED.replace(WITHOUT_USAGE, ""))
    wait_for(lambda: any('"kind":"system"' in file.read_text() for file in toy.store.glob("records/*/events.jsonl")))
    (tmp_path / "go.here").touch()
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert {"done"} == {node["state"] for node in toy.state()["nodes"].values()}


def test_a_record_that_is_removed_under_a_run_is_told_once_and_the_stages_end(tmp_path):
    toy = side(tmp_path, meets("a").replace("[]", '["never"]'))
    process = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "a.here").exists())
    record = next(toy.store.glob("records/*"))
    record.rename(tmp_path / "gone")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert errors.count(str(record)) == 1
    assert errors.startswith("dflow: ")


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.none() | st.integers(0, 3)), max_size=20))
def test_what_runs_never_takes_more_than_there_is_and_no_gpu_twice(wishes):
    capacity = Capacity(cpus=4, memory=4, gpus=("0", "1", "10"))
    free = Free(capacity)
    taken = []
    for cpus, memory, gpus in wishes:
        demand = Demand(cpus, memory, gpus)
        while not free.fits(demand):
            free.give_back(*taken.pop(0))
        taken.append((demand, free.take(demand, threads=1)))
        assert sum(demand.cpus for demand, _ in taken) <= 4
        assert sum(demand.memory for demand, _ in taken) <= 4
        given_away = [gpu for _, share in taken for gpu in share.gpus or ()]
        assert len(given_away) == len(set(given_away))
    for demand, share in taken:
        free.give_back(demand, share)
    assert free.fits(Demand(4, 4, 3))


def test_the_machine_of_a_run_is_what_it_may_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,-1,4")
    assert Capacity.of_this_machine(Machine()).gpus == ("2", "3")
    assert Capacity.of_this_machine(Machine(cpus=64, gpus=1, memory="3 GB")) == Capacity(64, 3 * 10**9, ("2",))


def test_threads_are_those_of_the_cpus_that_a_node_asks_for(tmp_path):
    toy = side(tmp_path, "[machine]\ncpus = 6\n" + meets("a"))
    assert toy.dflow("run", str(toy.file)).returncode == 0
    digest = toy.state()["nodes"]["a"]["digest"]
    assert json.loads((toy.store / "objects" / digest / "manifest.json").read_text())["launch"]["threads"] == 1


def test_nodes_come_after_their_parents_and_else_in_the_order_of_the_graph(tmp_path):
    parents = {"a": [], "b": ["a"], "c": [], "d": ["b", "c"], "e": []}
    nodes = "".join(
        f'[node.{name}]\nop = "join"\ntexts = {json.dumps([f"@{each}" for each in read])}\n'
        if read
        else f'[node.{name}]\nop = "make"\ntext = "{name}"\n'
        for name, read in parents.items()
    )
    toy = Toy(tmp_path, f'[pipeline]\nname = "ordered"\nops = ["toy.py"]\n[machine]\ncpus = 1\n{nodes}')
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0, result.stderr
    assert [line[0] for line in result.stdout.splitlines() if ": started" in line] == ["a", "b", "c", "d", "e"]
