"""The report's part on nodes and their times: what was cached, what was resumed, and where the picture stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from attrs import evolve
from counting_runs import PIPELINE, counting, report, run

from executor.records.metric_points import Point
from executor.report.artifacts import needs_width
from executor.report.figures import curves, figures_table
from executor.report.overview import pipelines
from executor.report.run_data import find_records, read_runs
from executor.store.artifact_store import Store
from ops.lib.report_sections import Body, Html, Picture, Table

EVENTS = [(100.0, "started"), (110.0, "stopped"), (5000.0, "started"), (5005.0, "done")]


def test_what_was_cached_has_the_memory_of_the_run_that_made_it(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    first = run(toy)
    run(toy, "-s", "filter.kept=5")
    earlier = {row[0]: row for row in report(toy, first).table("pipeline", "node", "op", "state", "time", "memory")}
    later = {row[0]: row for row in report(toy).table("pipeline", "node", "op", "state", "time", "memory")}
    assert ("cached", "done") == (later["source"][2], later["filter"][2])
    assert earlier["source"][3:5] == later["source"][3:5]
    assert later["source"][4].endswith("MB")


def test_a_run_that_was_resumed_took_the_time_that_was_worked_on_it(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    name = run(toy)
    events = [{"time": time, "node": "", "attempt": 0, "kind": "run", "state": state} for time, state in EVENTS]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (toy.store / "records" / name / "events.jsonl").write_text(text)
    facts = dict(report(toy).tables["runs"][0])
    assert "15.0 s" == facts["took"]


def test_tau_is_the_first_of_the_figures_whatever_else_has_an_interval() -> None:
    bounded = {"eval/speedup": 0.8, "eval/speedup_low": 0.6, "eval/speedup_high": 1.1}
    final = {"eval/kept": 7.0, **bounded, "eval/tau_text": 2.0, "eval/tau": 3.0}
    text = figures_table([(None, final)], is_one=True)  # type: ignore[list-item]
    names = re.findall("<tr><td>(.*?)</td>", text)
    assert ["eval/tau", "eval/tau_text", "eval/speedup", "eval/kept"] == [name.replace("<wbr>", "") for name in names]
    assert "eval/<wbr>tau_<wbr>text" in names, "a phone may begin a new line in it"


def test_the_table_of_nodes_has_no_column_of_gpus_where_none_was_used(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    store = Store.open(toy.store, write=False)
    facts = read_runs(store, find_records(store.records, []))[0]
    assert "GPU memory" not in pipelines([facts])
    nodes = {**facts.nodes, "source": evolve(facts.nodes["source"], gpu_memory=3_000_000_000)}
    assert "GPU memory" in pipelines([evolve(facts, nodes=nodes)])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (Table(("a", "b"), [("short", 1)]), False),
        (Table(("a", "b"), [("short", "an answer of the target that is many words long")]), True),
        (Table(("a", "b", "c", "d", "e"), []), True),
        (Html("<p>a page</p>"), True),
        (Picture(Path("a.png"), "a picture"), False),
    ],
)
def test_long_texts_and_many_columns_get_the_whole_width(body: Body, expected: bool) -> None:
    assert expected == needs_width(body)


def test_a_learning_rate_that_ends_near_zero_stands_on_an_axis_that_is_not_logarithmic(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    store = Store.open(toy.store, write=False)
    facts = read_runs(store, find_records(store.records, []))[0]
    points = [Point(0.0, step, {"lr": value, "many/x": value}) for step, value in ((1, 1e-3), (2, 1e-8))]
    facts.nodes["filter"].events.points[:] = points
    of_lr, _, others = curves([facts]).partition("1 more: x")
    assert (0, 1) == (of_lr.count("log scale"), others.count("log scale"))


def test_a_chart_of_one_metric_has_its_whole_name_and_the_selected_step_is_marked_on_tau_alone(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    store = Store.open(toy.store, write=False)
    facts = read_runs(store, find_records(store.records, []))[0]
    steps = [
        Point(0.0, step, {"val/tau": 1.5 - step, "val/loss": 2.0, "train/loss": 3.0, "train/tau": 1.0} | more)
        for step, more in ((10, {}), (20, {}), (30, {"val/selected_step": 20.0, "val/selected_tau": 0.5}))
    ]
    facts.nodes["filter"].events.points[:] = steps
    text = curves([facts])
    of_filter = text[text.index("<h3>filter") :]
    assert ["tau", "loss"] == re.findall("<h4>(.*?)</h4>", of_filter)
    assert ["val/tau: -18.5 at 20, the selected step"] == re.findall("<title>([^<]*selected step)", of_filter)
    assert 1 == of_filter.count("selected step: 20</span>")
    for point in steps:
        del point.metrics["train/tau"]  # type: ignore[attr-defined]
    text = curves([facts])
    of_filter = text[text.index("<h3>filter") :]
    assert ["val/tau", "loss"] == re.findall("<h4>(.*?)</h4>", of_filter)
    assert 1 == of_filter.count("selected step: 20</span>"), "though there is no legend"


@pytest.mark.parametrize(("copies", "expected"), [(2, 1), (3, 0)])
def test_the_table_stands_below_a_picture_that_is_wider_than_a_third(
    tmp_path: Path, copies: int, expected: int
) -> None:
    toy = counting(tmp_path, PIPELINE + "".join(f'[node.n{n}]\nop = "keep"\n' for n in range(1, copies)))
    run(toy)
    report(toy)
    text = (toy.store / "records" / toy.state()["run"] / "report.html").read_text()
    assert expected == text.count('<div class="beside"><div class="scroll graph"')
    assert 1 == text.count('<div class="scroll graph"')
