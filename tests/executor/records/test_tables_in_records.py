"""Runs of a node with a table in its config: what records, plan, explain, diff, report and MLflow show of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from ops_with_tables import HEAD, OPS
from report_page import Page
from toy_ops import Toy

from dsl.artifact_digest import MANIFEST
from dsl.read_toml import read_graph
from executor.cli import main
from executor.planning.session import make_planner
from executor.records.graph_file import load_graph
from executor.results.sweep import params
from executor.store.artifact_store import Store
from executor.store.manifest import Manifest

LOW = f'{HEAD}kind = "low"\nlow = {{ rank = 64, label = "${{secret:MY_TOKEN}}" }}\n'


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Two runs, the second with other values in the table."""
    made = Toy(tmp_path_factory.mktemp("toy"), LOW)
    (made.folder / "ranked_ops.py").write_text(OPS)
    for overrides in ((), ("-s", "train.low.rank=8", "-s", "train.low.chunk=2")):
        result = made.dflow("run", str(made.file), *overrides, MY_TOKEN="hf_abcdef")
        assert 0 == result.returncode, result.stderr
    return made


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_abcdef")


def records(toy: Toy) -> list[Path]:
    return sorted((toy.store / "records").iterdir())


def shown(toy: Toy, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert 0 == main([*arguments, "--store", str(toy.store)])
    return capsys.readouterr().out


def test_the_stage_gets_the_table_with_its_secrets_and_the_record_has_their_names(toy: Toy) -> None:
    assert "low=Low(rank=8, form='square', width=None, label='hf_abcdef', headers={}, chunk=2)" in toy.text("train")
    config = load_graph(records(toy)[1]).nodes["train"].config
    assert (8, "${secret:MY_TOKEN}", 2) == (config.low.rank, config.low.label, config.low.chunk)


def test_the_manifest_has_the_table_and_the_index_its_neutral_values(toy: Toy) -> None:
    state = toy.state()["nodes"]["train"]
    manifest = Manifest.read(toy.store / "objects" / state["digest"] / MANIFEST)
    low = {"rank": 8, "form": "square", "width": None, "label": "${secret:MY_TOKEN}", "headers": {}, "chunk": 2}
    assert (low, {"steps": 10}) == (manifest.config["low"], manifest.config["pace"])
    line = Store.open(toy.store, write=False).newest(state["key"])
    assert line is not None
    assert {"low": {"chunk": 2}, "note": ""} == {name: line.neutral[name] for name in line.neutral if name != "launch"}


def test_another_neutral_value_is_cached_and_another_value_is_named(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ["-s", "train.low.rank=64"]
    assert "cached" in shown(toy, capsys, "plan", str(toy.file), *first, "-s", "train.low.chunk=5")
    assert "config changed: train.low.rank from 8 to 16" in shown(
        toy, capsys, "plan", str(toy.file), "-s", "train.low.rank=16"
    )
    told = shown(toy, capsys, "plan", str(toy.file), "--why", "train", "-s", "train.low.rank=16")
    assert "config changed: train.low.rank from 8 to 16" in told


def test_what_a_trial_run_takes_in_the_place_of_a_value_is_named_beside_it(toy: Toy) -> None:
    small, full = (read_graph(toy.file, [f"train.low.rank={rank}"]) for rank in (16, 32))
    planner = make_planner(Store.open(toy.store, write=False), small)
    planner = attrs.evolve(planner, given={"train": full.nodes["train"].config})
    assert "config changed: train.low.rank from 8 to 16 (given: 32)" == planner.plan()["train"].reason


def test_a_difference_of_runs_names_the_fields(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    names = [record.name for record in records(toy)]
    (node,) = json.loads(shown(toy, capsys, "diff", *names, "--json"))["nodes"]
    assert [
        {"kind": "config", "name": "low.rank", "old": 64, "new": 8},
        {"kind": "setting", "name": "low.chunk", "old": 4, "new": 2},
    ] == node["changes"]


def test_a_report_has_a_row_for_each_field(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    for record, rank in zip(records(toy), ("64", "8"), strict=True):
        page = Page.read(Path(shown(toy, capsys, "report", record.name).split()[-1]))
        rows = [row for table in page.tables["configs"] for row in table]
        assert ["low.rank", rank] in rows and ["low.form", "square"] in rows


def test_the_parameters_of_a_node_are_flat(toy: Toy) -> None:
    found = params(read_graph(toy.file).nodes["train"])
    expected = {
        "low.rank": "64",
        "low.chunk": "4",
        "low.label": "${secret:MY_TOKEN}",
        "pace.steps": "10",
        "high": "none",
    }
    assert expected == {name: found[name] for name in expected}


def test_the_fields_of_tables_are_listed(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ops", str(toy.folder / "ranked_ops.py")]

    def listed(*more: str) -> str:
        assert 0 == main(["ops", "train", *options, *more])
        return capsys.readouterr().out

    assert "  low.rank: int (default 256)\n      of the low matrix\n" in listed()
    assert "  low.chunk: int (default 4, not part of the key)\n" in listed()
    assert '  pace: table (default {"steps": 10})\n' in listed()
    rows: list[dict[str, Any]] = json.loads(listed("--json"))["ops"][0]["fields"]
    assert {"low", "low.rank", "high.level", "pace", "pace.steps"} < {row["name"] for row in rows}
    assert {"steps": 10} == next(row["default"] for row in rows if row["name"] == "pace")
    table = listed("--markdown").splitlines()
    assert "| `low.rank` | int | `256` | of the low matrix |" in table
    assert "| *`low.chunk`* | int | `4` | rows at a time |" in table
    assert "| `high.level` | float | required | how high |" in table
