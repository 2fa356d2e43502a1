"""The report's part on nodes and their times: what was cached, what was resumed, and where the picture stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attrs import evolve
from counting_runs import counting, report, run

from dsl.files import compact, read_lines
from executor.report.artifacts import needs_width
from executor.report.page import figures_table, pipeline
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
    log = toy.store / "records" / name / "events.jsonl"
    lines = read_lines(log)
    *_, last = (line for line in lines if line["kind"] == "run")
    of_the_run = [{**last, "time": time, "state": state} for time, state in EVENTS]
    log.write_bytes(b"".join(map(compact, [*(line for line in lines if line["kind"] != "run"), *of_the_run])))
    facts = dict(report(toy).tables["runs"][0])
    assert "15.0 s" == facts["took"]


def test_tau_is_the_first_of_the_figures_whatever_else_has_an_interval() -> None:
    bounded = {"eval/speedup": 0.8, "eval/speedup_low": 0.6, "eval/speedup_high": 1.1}
    final = {"eval/kept": 7.0, **bounded, "eval/tau_text": 2.0, "eval/tau": 3.0}
    text = figures_table([("", final)], is_one=True)
    names = re.findall("<tr><td>(.*?)</td>", text)
    assert ["eval/tau", "eval/tau_text", "eval/speedup", "eval/kept"] == [name.replace("<wbr>", "") for name in names]
    assert "eval/<wbr>tau_<wbr>text" in names, "a phone may begin a new line in it"


def test_the_table_of_nodes_has_no_column_of_gpus_where_none_was_used(tmp_path: Path) -> None:
    toy = counting(tmp_path)
    run(toy)
    store = Store.open(toy.store, write=False)
    facts = read_runs(store, find_records(store.records, []))[0]
    assert "GPU memory" not in pipeline(facts)
    nodes = {**facts.nodes, "source": evolve(facts.nodes["source"], gpu_memory=3_000_000_000)}
    assert "GPU memory" in pipeline(evolve(facts, nodes=nodes))


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
