"""`dflow diff`: what differs between two runs, and what does not."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from report_page import Page
from toy_ops import Toy

from executor.cli import main
from executor.keys.differences import Difference
from executor.planning.run_diff import MetricPair, NodeDiff, RunsDiff, compare_runs, runs_text
from executor.records.run_record import find_record
from executor.store.artifact_store import Store
from executor.system.output import FAILED
from executor.system.trust import trust_store


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Three runs: the first, one with other values, code and nodes, and the first once more."""
    made = Toy(tmp_path_factory.mktemp("toy"))
    first = made.file.read_text()
    code = (made.folder / "toy_join.py").read_text()
    runs = []
    for text, ops, overrides in (
        (first, code, ()),
        (
            first.replace("[node.d]", '[node.e]\nop = "upper"\ntext = "@b"\n\n[node.d]').replace(
                '"@a", "@b"', '"@b", "@a"'
            ),
            code.replace("return between.join(texts)", "return between.join(texts) + ''"),
            ("-s", "a.text=other", "-s", "a.note=new", "-s", "c.weight=2.0"),
        ),
        (first, code, ()),
    ):
        made.file.write_text(text)
        (made.folder / "toy_join.py").write_text(ops)
        result = made.dflow("run", str(made.file), *overrides)
        assert result.returncode == 0, result.stderr
        runs.append(made.state()["run"])
    (made.folder / "runs.json").write_text(json.dumps(runs))
    return made


def runs_of(toy: Toy) -> list[str]:
    found: list[str] = json.loads((toy.folder / "runs.json").read_text())
    return found


def diff(toy: Toy, *runs: str) -> dict[str, Any]:
    result = toy.dflow("diff", *runs, "--json")
    assert result.returncode == 0, result.stderr
    return {node["node"]: node for node in json.loads(result.stdout)["nodes"]}


def test_values_code_inputs_artifacts_and_metrics_of_each_node_are_compared(toy: Toy) -> None:
    first, second, _third = runs_of(toy)
    nodes = diff(toy, first, second)
    assert ["a", "b", "c", "e", "d"] == list(nodes)
    assert [
        {"kind": "config", "name": "text", "old": "hello", "new": "other"},
        {"kind": "setting", "name": "note", "old": "", "new": "new"},
    ] == nodes["a"]["changes"]
    assert [
        {"kind": "config", "name": "weight", "old": 1.0, "new": 2.0},
        {"kind": "setting", "name": "texts", "old": ["@a", "@b"], "new": ["@b", "@a"]},
    ] == nodes["c"]["changes"]
    assert ["toy_join.py"] == [change["name"] for change in nodes["c"]["code"]]
    assert ["b", "a"] == nodes["c"]["inputs"]
    assert ("second", None) == (nodes["e"]["in"], nodes["e"]["digests"][0])
    assert nodes["c"]["digests"][0] != nodes["c"]["digests"][1]
    assert nodes["d"]["digests"][0] == nodes["d"]["digests"][1]
    [weight] = [pair for pair in nodes["c"]["metrics"] if pair["name"] == "join/weight"]
    assert {"name": "join/weight", "first": 1.0, "second": 2.0, "difference": 1.0, "same": False} == weight


def test_the_other_way_round_everything_is_the_other_way_round(toy: Toy) -> None:
    first, second, _third = runs_of(toy)
    there, back = diff(toy, first, second), diff(toy, second, first)
    assert there.keys() == back.keys()
    assert "first" == back["e"]["in"]
    for node, told in there.items():
        assert told["digests"] == back[node]["digests"][::-1]
        assert [(row.get("old"), row.get("new")) for row in told["changes"]] == [
            (row.get("new"), row.get("old")) for row in back[node]["changes"]
        ]


def test_the_second_run_is_the_latest_in_which_something_ran_and_one_that_only_took_from_the_store_is_the_same(
    toy: Toy,
) -> None:
    first, second, third = runs_of(toy)
    assert diff(toy, first) == diff(toy, first, second)
    text = toy.dflow("diff", first, third).stdout
    assert "Every node has the same key parts, settings and artifact in both." in text
    assert diff(toy, second, third)["a"]["changes"][0]["new"] == "hello"


def test_without_names_the_last_two_that_ran_are_compared_and_with_one_the_latest_other(toy: Toy) -> None:
    first, second, third = runs_of(toy)
    told = {
        asked: json.loads(toy.dflow("diff", *asked, "--json").stdout)
        for asked in ((), (first,), (third,), (second, second))
    }
    compared = {asked: (found["first"], found["second"]) for asked, found in told.items()}
    assert {
        (): (first, second),
        (first,): (first, second),
        (third,): (third, second),
        (second, second): (second, second),
    } == compared


def test_one_run_alone_can_be_compared_with_nothing(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [first, *others] = runs_of(toy)
    store = shutil.copytree(toy.store, tmp_path / "store", ignore=shutil.ignore_patterns(*others))
    for asked in ((), (first,)):
        assert FAILED == main(["diff", *asked, "--store", str(store)])
        assert f"the store holds no run other than {first}" in capsys.readouterr().err


def test_the_table_is_for_people(toy: Toy) -> None:
    first, second, _third = runs_of(toy)
    lines = toy.dflow("diff", first, second).stdout.splitlines()
    assert lines[0].startswith(f"first   {first}  toy  20")
    rows = {line.split()[0]: line for line in lines if line[:3] in ("a  ", "d  ", "e  ")}
    assert rows["a"].endswith("another artifact")
    assert rows["d"].endswith("the same artifact")
    assert rows["e"].endswith("only in the second")
    assert '  config changed: a.text from "hello" to "other"' in lines
    assert "c     join/weight  1      2       +1 (+100.00%)" in lines


def test_values_and_figures_of_a_node_that_one_run_alone_has_are_told(toy: Toy) -> None:
    first, _second, _third = runs_of(toy)
    renamed = toy.folder / "renamed.toml"
    renamed.write_text(toy.file.read_text().replace("[node.d]", "[node.dd]"))
    store = shutil.copytree(toy.store, toy.folder / "renamed")
    trust_store(store)
    result = toy.dflow("run", str(renamed), "--store", str(store))
    assert 0 == result.returncode, result.stderr
    text = toy.dflow("diff", first, "--store", str(store)).stdout
    values = 'text "@c", steps 5, seconds 0.0, fail_at -1, error "data"'
    assert f"dd:\n  only in the second: {values}\n" in text
    assert f"d:\n  only in the first: {values}\n" in text
    assert "dd    steps/loss  -      0.2" in text
    nodes = json.loads(toy.dflow("diff", first, "--json", "--store", str(store)).stdout)["nodes"]
    [told] = [node for node in nodes if node["node"] == "dd"]
    assert {"kind": "value", "name": "steps", "new": 5} in told["changes"]
    assert [(None, 0.2)] == [(pair["first"], pair["second"]) for pair in told["metrics"]]


def test_a_run_that_was_killed_is_not_told_as_running(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _third = runs_of(toy)
    store = shutil.copytree(toy.store, toy.folder / "killed")
    trust_store(store)
    record = find_record(store / "records", second)
    record.state.status = "running"
    record.save()
    assert 0 == main(["diff", first, second, "--store", str(store)])
    assert ["done", "killed"] == [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]]


def test_a_run_that_is_not_there_is_an_error(toy: Toy) -> None:
    result = toy.dflow("diff", "19990101")
    assert (2, True) == (result.returncode, "is no run of this store" in result.stderr)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (math.nan, math.nan, {"first": None, "second": None, "difference": None, "same": True}),
        (math.nan, None, {"first": None, "second": None, "difference": None, "same": False}),
        (math.inf, 1.0, {"first": None, "second": 1.0, "difference": None, "same": False}),
        (1, 1.0, {"first": 1, "second": 1.0, "difference": 0.0, "same": True}),
    ],
)
def test_a_figure_that_is_no_number_equals_itself_and_is_null_in_json(
    first: float | None, second: float | None, told: dict[str, Any]
) -> None:
    changes = (Difference("config", "limit", math.inf, [1.0, -math.inf]),)
    node = NodeDiff("a", "both", ("d", "d"), values=changes, metrics=(MetricPair("loss", first, second),)).to_json()
    assert [{"name": "loss", **told}] == json.loads(json.dumps(node, allow_nan=False))["metrics"]
    assert (None, [1.0, None]) == (node["changes"][0]["old"], node["changes"][0]["new"])


@pytest.mark.parametrize(
    ("digests", "told"),
    [
        ((None, "b" * 64), "not finished in the first"),
        (("a" * 64, None), "not finished in the second"),
        ((None, None), "not finished in the first and the second"),
    ],
)
def test_the_table_says_in_which_run_a_node_is_not_finished(
    toy: Toy, digests: tuple[str | None, str | None], told: str
) -> None:
    store = Store.open(toy.store, write=False)
    first, second = (find_record(store.records, run) for run in runs_of(toy)[:2])
    node = evolve(compare_runs(store, first, second).nodes[0], digests=digests, where="both")
    lines = runs_text(first, second, RunsDiff([node])).splitlines()
    assert told in [line.strip().rpartition("  ")[2] for line in lines]


OF_FILES = '''
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="files:joined")
@frozen(kw_only=True)
class Joined:
    """Joins files."""
    files: str | tuple[str, ...] = field(external=True, help="files")
    output = Text


def joined(config, stage):
    files = [config.files] if isinstance(config.files, str) else config.files
    (stage.out_dir / "text.txt").write_text("".join(Path(file).read_text() for file in files))
'''


def test_the_files_of_a_list_are_named_and_not_their_places_in_the_key(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    (tmp_path / "files.py").write_text(OF_FILES)
    names = [tmp_path / f"{letter}.txt" for letter in "abc"]
    for name in names:
        name.write_text(name.stem)
    runs = []
    for files in ('"a.txt"', '["b.txt", "a.txt"]', '["c.txt", "a.txt"]'):
        head = '[pipeline]\nname = "files"\nops = ["files.py"]\n\n[node.a]\nop = "joined"\n'
        toy.file.write_text(f"{head}files = {files}\n")
        if runs:
            plan = toy.dflow("plan", str(toy.file), "--why", "a").stdout
            assert "null" not in plan
            assert f"content changed: a.files[0] ({names[len(runs)]}) " in plan
        result = toy.dflow("run", str(toy.file))
        assert 0 == result.returncode, result.stderr
        runs.append(toy.state()["run"])
    a, b, c = names
    changes = diff(toy, *runs[:2])["a"]["changes"]
    assert [("files", str(a)), ("files[0]", str(b)), ("files[1]", str(a))] == [
        (change["name"], change["path"]) for change in changes
    ]
    assert [("files[0]", f"{b}, now {c}")] == [
        (change["name"], change["path"]) for change in diff(toy, *runs[1:])["a"]["changes"]
    ]
    result = toy.dflow("report", *runs[1:])
    told = Page.read(Path(result.stdout.strip())).text("differences")
    assert f"content changed: a.files[0] ({b}, now {c})" in told
