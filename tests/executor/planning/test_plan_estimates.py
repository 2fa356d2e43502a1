"""The executor asks ops what they need and prints it; what the figures mean is the ops' own affair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_ops import Toy

from dsl.estimate import Estimate
from dsl.files import free_bytes
from dsl.read_toml import read_graph
from dsl.shown import shown_bytes
from executor.planning.preflight import graph_estimates, too_large
from executor.records.run_record import Record
from executor.store.artifact_store import Store

TELLING = '''
from pathlib import Path
from attrs import frozen
from dsl.errors import DataError, NotKnown
from dsl.op import Artifact, field, op
from dsl.estimate import Estimate


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="telling:begin")
@frozen(kw_only=True)
class Begin:
    """Writes a text."""
    length: int = field(default=3, help="letters")
    output = Text

    def estimate(self, context):
        if self.length < 0:
            raise DataError("a text has no negative length")
        if self.length == 0:
            raise NotKnown("the length of a download")
        forecast = self.length
        if context.artifact is not None:
            forecast = 100 * len((context.artifact / "text.txt").read_text())
        return Estimate(disk={"text": 5_000_000}, notes=(f"writes {self.length}",), forecast=forecast)


def begin(config, stage):
    (stage.out_dir / "text.txt").write_text("a" * config.length)


@op(version=1, run="telling:end")
@frozen(kw_only=True)
class End:
    """Reads texts."""
    texts: tuple[Text, ...]
    one: Text | None = None
    output = Text

    def estimate(self, context):
        known = [*context.inputs["texts"], context.inputs["one"]]
        return Estimate(
            memory={"small": 10**9, "large": 2 * 10**9},
            per_pass={"a layer": 4 * 10**9, "masks": 10**9},
            disk={"all": 10**9},
            disk_per="a page",
            notes=(f"sees {known} in {context.root.name} on {context.launch.device}",),
        )


def end(config, stage):
    (stage.out_dir / "text.txt").write_text("b")


@op(version=1, run="telling:begin")
@frozen(kw_only=True)
class Silent:
    """Tells nothing."""
    length: int = field(default=1)
    output = Text
'''
PIPELINE = """
[pipeline]
name = "telling"
ops = ["telling.py"]

[node.a]
op = "begin"

[node.b]
op = "silent"

[node.c]
op = "end"
texts = ["@a", "@b"]
one = "@a"
launch = { device = "cpu" }
"""


def telling(tmp_path: Path) -> Toy:
    (tmp_path / "telling.py").write_text(TELLING)
    return Toy(tmp_path, PIPELINE)


def told(toy: Toy, *arguments: str) -> dict[str, dict]:
    result = toy.dflow("plan", str(toy.file), "--json", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)["resources"]


def test_ops_are_told_what_is_forecast_above_them(tmp_path: Path) -> None:
    assert told(telling(tmp_path)) == {
        "a": {
            "memory": {}, "memory_total": 0, "memory_measured": None, "pass": {}, "pass_total": 0,
            "disk": {"text": 5_000_000}, "disk_total": 5_000_000, "disk_per": "",
            "notes": ["writes 3"],
        },
        "c": {
            "memory": {"small": 10**9, "large": 2 * 10**9}, "memory_total": 3 * 10**9, "memory_measured": None,
            "pass": {"a layer": 4 * 10**9, "masks": 10**9}, "pass_total": 5 * 10**9,
            "disk": {"all": 10**9}, "disk_total": 10**9, "disk_per": "a page",
            "notes": [f"sees [3, None, 3] in {tmp_path.name} on cpu"],
        },
    }  # fmt: skip


def test_a_node_that_is_made_needs_nothing_and_tells_its_readers_what_it_is(tmp_path: Path) -> None:
    toy = telling(tmp_path)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    told_after = told(toy, "-s", "b.length=2")
    assert ({}, []) == (told_after["a"]["disk"], told_after["a"]["notes"])
    assert [f"sees [300, None, 300] in {tmp_path.name} on cpu"] == told_after["c"]["notes"]


def test_what_an_op_does_not_know_is_a_note_and_the_plan_stands(tmp_path: Path) -> None:
    unknown = told(telling(tmp_path), "-s", "a.length=0")
    assert ["what it needs cannot be estimated: the length of a download"] == unknown["a"]["notes"]
    assert [f"sees [None, None, None] in {tmp_path.name} on cpu"] == unknown["c"]["notes"]


def test_what_an_op_refuses_to_estimate_is_a_mistake_and_the_others_are_estimated(tmp_path: Path) -> None:
    toy = telling(tmp_path)
    shown = toy.dflow("plan", str(toy.file), "--json", "-s", "a.length=-1")
    plan = json.loads(shown.stdout)
    assert (2, ["node.a: a text has no negative length"]) == (shown.returncode, plan["missing_here"])
    assert {"c": [f"sees [None, None, None] in {tmp_path.name} on cpu"]} == {
        node_id: needs["notes"] for node_id, needs in plan["resources"].items()
    }
    run = toy.dflow("run", str(toy.file), "-s", "a.length=-1")
    assert (2, "node.a: a text has no negative length\n") == (run.returncode, run.stderr)


def test_the_plan_prints_sums_parts_and_notes_below_the_nodes(tmp_path: Path) -> None:
    toy = telling(tmp_path)
    lines = [line.split() for line in toy.dflow("plan", str(toy.file)).stdout.splitlines()]
    start = lines.index(["node", "ranks", "held", "each", "a", "pass", "took", "last", "disk"])
    assert lines[start + 1 : start + 3] == [
        ["a", "1", "5", "MB"],
        ["c", "1", "3.0", "GB", "5.0", "GB", "1.0", "GB", "for", "a", "page"],
    ]
    assert "took last: its peak when the node ran last;" in " ".join(lines[start + 3])
    assert "of disk are free at" in " ".join(lines[start + 4])
    assert [" ".join(line) for line in lines[start + 5 :]] == [
        "a: writes 3",
        "c: memory: large 2.0 GB, small 1.0 GB",
        "c: a pass: a layer 4.0 GB, masks 1.0 GB",
        f"c: sees [3, None, 3] in {tmp_path.name} on cpu",
    ]


def test_an_op_hears_on_which_device_its_node_computes(tmp_path: Path) -> None:
    toy = telling(tmp_path)
    code = (tmp_path / "telling.py").read_text()
    (tmp_path / "telling.py").write_text(
        code.replace('run="telling:end")', 'run="telling:end", key_libraries=("torch",), gpu=True)')
    )
    (tmp_path / "on_any.toml").write_text(toy.file.read_text().replace('launch = { device = "cpu" }', ""))
    for device, file, gpus in (
        ("cpu", toy.file, "0"),
        ("cpu", tmp_path / "on_any.toml", ""),
        ("auto", tmp_path / "on_any.toml", "0"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", gpus)
            found = graph_estimates(read_graph(file), {}, 0).needs["c"]
        assert found.notes[0].endswith(f" on {device}")


def test_a_node_that_ran_before_shows_its_peak_memory_and_one_that_no_longer_fits_is_reported(tmp_path: Path) -> None:
    toy = telling(tmp_path)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    [record] = Store.open(toy.store, write=False).records.iterdir()
    measured = Record.load(record).state.nodes["c"].memory
    assert measured is not None and measured > 10**6
    assert measured == told(toy, "-s", "a.length=4")["c"]["memory_measured"]
    row = next(
        line
        for line in toy.dflow("plan", str(toy.file), "-s", "a.length=4").stdout.splitlines()
        if line.startswith("c ") and " GB" in line
    )
    assert ["c", "1", "3.0", "GB", "5.0", "GB", *shown_bytes(measured).split(), "1.0", "GB"] == row.split()[:10]
    graph, needs = read_graph(toy.file), {"c": Estimate(memory={"small": 10})}
    took = {"c": measured}
    assert [] == too_large(graph, needs, lambda: None, measured, took)
    [line] = too_large(graph, needs, lambda: None, measured - 1, took)
    assert line.startswith("c: memory: DOES NOT FIT: needs ")


def test_free_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) // 10**9 == free_bytes(tmp_path / "not" / "there") // 10**9
