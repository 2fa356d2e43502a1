"""A node that runs again may make the same content and measure something else: each run shows what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manifests import made
from report_page import Page
from toy_ops import Toy
from tracked_toy import artifacts, client_of, ids, send, tracked_toy

from dsl.convert import unstructure
from executor.store.manifest import own_files

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OPS = """
import json
from pathlib import Path
from typing import Any
from attrs import frozen
from dsl.op import Artifact, field, op
from ops.lib.report_sections import Picture, Section, Table


@frozen
class Answers(Artifact):
    '''answers.txt'''


@op(version=1, run="measures:measure")
@frozen(kw_only=True)
class Measure:
    '''Always the same answers, at a speed that the machine has.'''
    speed: float = field(default=1.0, neutral=True, help="of the machine")
    logs: bool = field(default=True, help="whether the speed is logged")
    output = Answers

    @staticmethod
    def report(folder):
        return shown(folder)


def measure(config, stage):
    (stage.out_dir / "sub").mkdir()
    (stage.out_dir / "sub" / "answers.txt").write_text("answers")
    (stage.out_dir / "plot.png").write_bytes(b"a picture")
    (stage.out_dir / "measurements.json").write_text(json.dumps({"speed": config.speed}))
    stage.log({"eval/speed": config.speed if config.logs else 0.0, "eval/nan": float("nan")}, step=0)


def shown(folder):
    yield Section("answers", Table(("answer", "number"), [((folder / "sub" / "answers.txt").read_text(), 1)]))
    yield Section("plot", Picture(folder / "plot.png", "a plot"))
    if (folder / "measurements.json").exists():
        measured = json.loads((folder / "measurements.json").read_text())
        yield Section("speed", Table(("way", "speed"), [("measured", measured["speed"])]))


@op(version=1, run="measures:use")
@frozen(kw_only=True)
class Use:
    '''A node beside it.'''
    text: str = field(default="", help="a text")
    output = Answers


def use(config, stage):
    (stage.out_dir / "answers.txt").write_text(config.text)
"""

PIPELINE = """
[pipeline]
name = "measures"
ops = ["measures.py"]
[node.m]
op = "measure"
[node.n]
op = "use"
"""


def measured_twice(toy: Toy, *overrides: str) -> tuple[str, str, str]:
    """Runs that measured 1.0 and 2.0 and have the same artifact, and one that took it from the second."""
    (toy.folder / "measures.py").write_text(OPS)
    runs = [
        ran(toy, "run", str(toy.file), *overrides),
        ran(toy, "resume", "--from", "m", "-s", "m.speed=2.0"),
        ran(toy, "run", str(toy.file), *overrides, "-s", "n.text=other", "-s", "m.speed=2.0"),
    ]
    first, second, third = (node_m(toy, run) for run in runs)
    assert first["digest"] == second["digest"] == third["digest"]
    assert ("hit", runs[1]) == (third["cache"], third["source_run"])
    return runs[0], runs[1], runs[2]


def ran(toy: Toy, *arguments: str) -> str:
    result = toy.dflow(*arguments)
    assert 0 == result.returncode, result.stderr
    name: str = toy.state()["run"]
    return name


def node_m(toy: Toy, run: str) -> dict[str, Any]:
    lines = map(json.loads, (toy.store / "records" / run / "events.jsonl").read_text().splitlines())
    found: dict[str, Any] = [line for line in lines if (line["node"], line["kind"]) == ("m", "state")][-1]
    return found


def report(toy: Toy, *runs: str) -> Page:
    result = toy.dflow("report", *runs)
    assert 0 == result.returncode, result.stderr
    return Page.read(Path(result.stdout.strip()))


def speeds(page: Page) -> list[str]:
    """The measurements that the op shows in the report."""
    return [rows[1][1] for rows in page.tables["artifacts"] if rows[0] == ["way", "speed"]]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, tuple[str, str, str]]:
    toy = tracked_toy(tmp_path_factory.mktemp("twice"), PIPELINE, tracked=False)
    return toy, measured_twice(toy)


def test_the_report_of_each_run_shows_what_that_run_measured(twice: tuple[Toy, tuple[str, str, str]]) -> None:
    toy, runs = twice
    for run, speed in zip(runs, ("1", "2", "2"), strict=True):
        page = report(toy, run)
        assert [speed] == speeds(page)
        assert [["eval/speed", speed]] == [row for row in page.table("results", "figure") if row[0] == "eval/speed"]
        assert "data:image/png" in " ".join(page.addresses), "a picture of the artifact, through the folder of links"


def test_a_report_of_two_runs_shows_both_figures_and_once_what_is_the_same(
    twice: tuple[Toy, tuple[str, str, str]],
) -> None:
    toy, (first, second, third) = twice
    names = [run.rpartition("-")[2] for run in (first, second, third)]
    page = report(toy, first, second)
    assert ["eval/speed", "1", "2 +1"] in page.table("results", "figure", *names[:2])
    assert "setting changed: m.speed from 1.0 to 2.0" in page.text("differences")
    assert f"2 runs: {names[0]}, {names[1]}" in page.text("")
    page = report(toy, second, third)
    assert ["eval/speed", "2"] in page.table("results", "figure", f"{names[1]}; {names[2]}")


def test_what_was_measured_stands_apart_where_no_logged_figure_tells_of_it(tmp_path: Path) -> None:
    toy = Toy(tmp_path, PIPELINE)
    first, second, _ = measured_twice(toy, "-s", "m.logs=false")
    names = "; ".join(run.rpartition("-")[2] for run in (first, second))
    assert ["eval/speed", "0"] in report(toy, first, second).table("results", "figure", names), "nan is nan"
    assert [["1"], ["2"]] == [speeds(report(toy, run)) for run in (first, second)]


def test_mlflow_gets_the_measurements_and_the_manifest_of_each_run(twice: tuple[Toy, tuple[str, str, str]]) -> None:
    toy, runs = twice
    client = client_of(toy)
    for run, maker, speed in zip(runs, (runs[0], runs[1], runs[1]), (1.0, 2.0, 2.0), strict=True):
        record = toy.store / "records" / run
        send(toy, record)
        child = ids(record)[1]["m"]
        folder = toy.store / "mlartifacts" / child / "artifacts"
        manifest = json.loads((folder / "manifest.json").read_text())
        assert (maker, speed) == (manifest["run"], manifest["config"]["speed"])
        assert speed == client.get_run(child).data.metrics["eval/speed"]
        if run == maker:
            assert {"speed": speed} == json.loads((folder / "artifact" / "measurements.json").read_text())
            assert "artifact/sub/answers.txt" in artifacts(client, child)


def test_measurements_stay_with_the_record_and_go_with_it(tmp_path: Path) -> None:
    toy = Toy(tmp_path, PIPELINE)
    first, second, third = measured_twice(toy)
    assert 0 == toy.dflow("rm", first, "--yes").returncode
    assert 0 == toy.dflow("gc", "--keep", "9", "--delete").returncode
    assert ["2"] == speeds(report(toy, second))
    assert 0 == toy.dflow("rm", second, "--yes").returncode
    assert not (toy.store / "records" / second).exists()
    page = report(toy, third)
    assert [] == speeds(page), "not those of the first run, which the artifact still holds"
    assert ["eval/speed", "2"] in page.table("results", "figure")


def test_what_is_taken_after_the_measuring_run_was_removed_has_no_figures_of_another_run(tmp_path: Path) -> None:
    toy = Toy(tmp_path, PIPELINE)
    first, second, _ = measured_twice(toy)
    assert 0 == toy.dflow("rm", second, "--yes").returncode
    run = ran(toy, "run", str(toy.file), "-s", "n.text=new", "-s", "m.speed=2.0")
    node = node_m(toy, run)
    assert second == node["source_run"]
    assert {} == node.get("metrics", {})
    assert [f"the metrics of run {second}, which made this artifact, are missing; run {first} made the same"] == node[
        "warnings"
    ]
    page = report(toy, run)
    assert [] == speeds(page)
    assert "eval/speed" not in page.text("results")


def test_what_was_accepted_for_other_code_keeps_the_figures_of_the_run_that_measured(tmp_path: Path) -> None:
    toy = Toy(tmp_path, PIPELINE)
    _, second, _ = measured_twice(toy)
    folder = 'stage.out_dir / "sub"'
    for changed in (f"({folder}).mkdir(exist_ok=False)", f"({folder}).mkdir(parents=False)"):
        (toy.folder / "measures.py").write_text(OPS.replace(f"({folder}).mkdir()", changed))
        assert 0 == toy.dflow("accept", str(toy.file), "m", "--yes", "--reason", "the same").returncode
        run = ran(toy, "run", str(toy.file), "-s", f"n.text={changed[-6:-1]}", "-s", "m.speed=2.0")
        node = node_m(toy, run)
        assert ("accepted", second, 2.0) == (node["acceptance"], node["source_run"], node["metrics"]["eval/speed"])
        page = report(toy, second, run)
        names = "; ".join(name.rpartition("-")[2] for name in (second, run))
        assert ["eval/speed", "2"] in page.table("results", "figure", names)
        assert ["2"] == speeds(report(toy, run))


def test_what_an_older_dflow_did_not_keep_is_missing_and_not_taken_from_another_run(tmp_path: Path) -> None:
    folder, records = tmp_path / "objects" / "d", tmp_path / "records"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(unstructure(made("k", digest="d")[0])))
    (folder / "measurements.json").write_text("{}")
    there = {name: folder / name for name in ("manifest.json", "measurements.json")}
    assert there == own_files(records, "r1", "k", folder)
    assert there == own_files(records, "r1", "accepted for another key", folder)
    assert there == own_files(records, None, "k", folder), "an artifact that is taken as it is"
    assert {} == own_files(records, "r2", "k", folder)
