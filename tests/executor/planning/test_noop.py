"""What a run costs in which nothing is to be done: modules that are loaded and files that are opened, not seconds."""

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from toy_ops import PROJECT, Toy

from dsl.read_toml import read_graph
from executor.planning.session import make_planner, new_run
from executor.records.run_record import Record
from executor.store.artifact_store import Store

HEAVY = {"torch", "mlflow", "transformers", "networkx", "rich", "pandas", "numpy", "sqlalchemy", "fsspec"}
RUNNING = {
    "executor.scheduler.run_loop",
    "executor.scheduler.stage_pool",
    "executor.launchers.host_run",
    "executor.tracking.mlflow_client",
    "subprocess",
    "multiprocessing",
}
# Prints the names of all loaded modules, and each file that was opened within the test's folder, at the end.
WATCHED = """
import atexit, json, os, sys
opened = []

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        opened.append(os.fspath(arguments[0]))

def tell():
    here = os.getcwd()
    files = [name for name in opened if isinstance(name, str) and name.startswith(here)]
    print("SEEN", json.dumps({"modules": list(sys.modules), "files": files}))

sys.addaudithook(note)
atexit.register(tell)
import executor.cli
sys.exit(executor.cli.main())
"""


def chain(size):
    nodes = ['[pipeline]\nname = "chain"\nops = ["toy.py"]\n[node.n0]\nop = "make"\ntext = "a"\n']
    nodes += [f'[node.n{k}]\nop = "join"\ntexts = ["@n{k - 1}"]\nweight = {k}.0\n' for k in range(1, size)]
    return "".join(nodes)


class Watched:
    """A chain that ran once, and what a second run of it said, loaded and opened."""

    def __init__(self, folder, size):
        folder.mkdir()
        self.toy = Toy(folder, chain(size))
        result = self.toy.dflow("run", str(self.toy.file))
        assert result.returncode == 0, result.stderr
        self.first = self.toy.state()["run"]
        again = subprocess.run(
            [sys.executable, "-c", WATCHED, "run", str(self.toy.file)],
            cwd=folder,
            env={
                "PYTHONPATH": str(PROJECT),
                "PYTHONSAFEPATH": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
            },
            capture_output=True,
            text=True,
        )
        assert (again.returncode, again.stderr) == (0, "")
        self.said, _, seen = again.stdout.partition("SEEN")
        self.modules = set(json.loads(seen)["modules"])
        self.files = Counter(Path(file).relative_to(folder).as_posix() for file in json.loads(seen)["files"])


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("noop") / "short", 3)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("noop") / "long", 12)


def test_it_says_so_and_names_the_run_that_holds_the_results(short):
    run = short.toy.state()["run"]
    assert short.said.splitlines()[0] == "nothing to do: all 3 nodes are cached"
    assert short.said.splitlines()[1:] == [
        "results of n2",
        "metric       value  interval",
        "join/length      1",
        "join/weight      2",
        f"run {run} is done, its results are those of run {short.first}",
    ]


def test_it_loads_nothing_heavy_and_nothing_that_runs_stages(short):
    assert "executor.scheduler.run_and_report" in short.modules
    assert (HEAVY | RUNNING) & short.modules == set()


def test_for_each_node_it_opens_the_index_and_the_manifest_once_and_no_data(long):
    for kind, name in (("index", "*"), ("objects", "*/manifest.json")):
        there = {path.relative_to(long.toy.folder).as_posix() for path in (long.toy.store / kind).glob(name)}
        assert there
        assert {file: long.files[file] for file in there} == dict.fromkeys(there, 1)
    assert [file for file in long.files if file.endswith(("text.txt", "measurements.json"))] == []


def test_the_files_that_it_opens_beside_those_do_not_grow_with_the_nodes(short, long):
    others = [
        {file: count for file, count in watched.files.items() if not file.startswith(("runs/index/", "runs/objects/"))}
        for watched in (short, long)
    ]
    counts = [Counter({_same_name(file): count for file, count in found.items()}) for found in others]
    for name in ("toy.py", "toy_join.py", "modules.jsonl"):  # code that was written just now is not remembered yet
        for found in counts:
            found.pop(name, None)
    assert counts[0] == counts[1]
    assert counts[0].total() < 20


def _same_name(file):
    """The name of a file without what differs from run to run: the run's id, and numbers of a process and a thread."""
    return re.sub(r"(\.\d+)+$", "", re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN", Path(file).name))


def test_its_record_is_one_write_for_all_nodes_and_tells_no_key_parts(long):
    record = Record.load(long.toy.store / "records" / long.toy.state()["run"])
    lines = (record.folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", *12 * ["state"], "run"]
    assert {"cache", "key", "parents"} == {name for row in record.plan().values() for name in row.to_json()}
    assert {node.state for node in record.state.nodes.values()} == {"done"}


def test_a_long_chain_is_read_planned_and_recorded_without_recursion(tmp_path):
    toy = Toy(tmp_path, chain(2000))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 90)
    try:
        store = Store.open(toy.store, write=True)
        graph = read_graph(toy.file)
        decisions = make_planner(store, graph).plan()
        session = new_run(store, graph)
        closed = Record.load(session.record.folder).graph()
    finally:
        sys.setrecursionlimit(limit)
    assert {decision.reason for decision in decisions.values()} == {"new"}
    assert list(closed.nodes) == list(graph.nodes) == [f"n{k}" for k in range(2000)]
