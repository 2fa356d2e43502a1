"""How many CPU threads a stage gets, and how they wait for work: whoever else uses the machine."""

import json

import pytest
from side_ops import side

from executor.launchers.host_run import stage_environment

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY")
BOUNDED = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "0"}
TWO_CPUS = "[machine]\ncpus = 2\n"


def small(name, size, more=""):
    return f'[node.{name}]\nop = "small"\nsize = {size}\n{more}'


def threads(toy, name):
    """The number of threads that the stage found, and that in its manifest."""
    digest = toy.state()["nodes"][name]["digest"]
    manifest = json.loads((toy.store / "objects" / digest / "manifest.json").read_text())
    return int(toy.text(name)), manifest["launch"]["threads"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, BOUNDED),
        ({"GOMP_SPINCOUNT": "70000"}, {"GOMP_SPINCOUNT": "70000", "KMP_BLOCKTIME": "0"}),
        ({"KMP_BLOCKTIME": "200"}, {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "200"}),
        ({"KMP_LIBRARY": "turnaround"}, {"GOMP_SPINCOUNT": "4000", "KMP_LIBRARY": "turnaround"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
    ids=["nothing", "libgomp", "intel", "intel's mode", "any runtime"],
)
def test_threads_that_wait_sleep_soon_unless_the_user_has_chosen(chosen, expected, monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    environment = stage_environment(2)
    assert expected == {name: environment[name] for name in WAITING if name in environment}


@pytest.mark.parametrize("kind", ["process", "ranks"])
def test_torchs_openmp_runtime_takes_the_bound_in_every_process_of_a_stage(kind, tmp_path):
    ranks = 2 if kind == "ranks" else 1
    toy = side(tmp_path, small("a", 1, f'launch = {{ kind = "{kind}", nproc = {ranks}, threads = 2 }}\n'))
    result = toy.dflow("run", str(toy.file), OMP_DISPLAY_ENV="verbose")
    assert result.returncode == 0, result.stderr
    (log,) = toy.store.glob("records/*/a.log")
    said = [line.strip() for line in log.read_text().splitlines() if "GOMP_SPINCOUNT" in line]
    assert ["GOMP_SPINCOUNT = '4000'"] * ranks == said[-ranks:]
    assert {"GOMP_SPINCOUNT = '4000'"} == set(said)


def test_a_node_that_makes_use_of_one_thread_takes_one_cpu_and_has_as_many_threads_beside_others_as_alone(tmp_path):
    both = TWO_CPUS + small("a", 1, 'beside = "2"\n') + small("b", 2, 'beside = "1"\n')
    toy = side(tmp_path, both + small("c", 3, 'text = "@a"\n'))
    result = toy.dflow("run", str(toy.file))  # a and b end only side by side; c runs alone
    assert result.returncode == 0, result.stderr
    assert [(1, 1)] * 3 == [threads(toy, name) for name in "abc"]


def test_a_number_that_the_user_gives_wins_over_the_ops_own_and_a_large_one_gets_all(tmp_path):
    nodes = (
        small("a", 1, "launch = { threads = 2 }\n") + small("b", 99, 'text = "@a"\n') + small("c", 98, 'text = "@a"\n')
    )
    toy = side(tmp_path, "[machine]\ncpus = 3\n" + nodes)
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0, result.stderr
    assert [(2, 2), (3, 3), (1, 1)] == [threads(toy, name) for name in "abc"]


def test_an_op_whose_own_function_of_threads_fails_fails_alone(tmp_path):
    toy = side(tmp_path, TWO_CPUS + small("a", -1) + small("b", -2) + small("c", 1) + small("d", 2, 'text = "@a"\n'))
    result = toy.dflow("run", str(toy.file), "--keep-going")
    assert 1 == result.returncode
    assert "Traceback" not in result.stderr
    assert {"a": "failed", "b": "failed", "c": "done", "d": "pending"} == {
        name: node["state"] for name, node in toy.state()["nodes"].items()
    }
    errors = [toy.state()["nodes"][name]["error"] for name in "ab"]
    assert 'threads() of op "small" failed: KeyError: -1' in errors[0]
    assert "it returned -2, not a number of threads or None" in errors[1]
