"""A report is written soon and stays small, whatever ops do and however large a run is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from counting_runs import PIPELINE, counting, run
from markupsafe import Markup
from report_page import Page
from toy_ops import is_alive, wait_for

from executor.records.events import Event, Point, System
from executor.report import page
from executor.report.page import curves, figures_table, write_report
from executor.report.run_data import RunFacts, find_records, read_runs
from executor.report.templates import MOST_ROWS, MOST_TEXT, limited, render, table
from executor.results import op_hooks
from executor.store.artifact_store import Store
from executor.tracking import publisher

NAN = float("nan")


@pytest.mark.parametrize(
    ("times", "why"),
    [
        # Long enough for a process that starts, or shows the first node, while the machine stands still.
        ({"TIME_S": 12.0, "TOTAL_S": 600.0}, "it took longer than 12 s"),
        ({"TIME_S": 600.0, "TOTAL_S": 20.0}, "all ops together took longer than 20 s"),
    ],
)
def test_an_op_that_takes_too_long_ends_with_all_that_it_started_and_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: dict[str, float], why: str
) -> None:
    for name, seconds in times.items():
        monkeypatch.setattr(op_hooks, name, seconds)
    toy = counting(tmp_path, PIPELINE.replace("kept = 7", 'kept = 7\nfails = "hangs"'))
    run(toy)
    write_report(toy.store, [], tmp_path / "page.html")
    found = Page.read(tmp_path / "page.html")
    assert f"filter The sections of op keep are missing here: {why}" in found.text("artifacts")
    assert ["<p>page of 10</p>"] == found.frames
    child = int((toy.store / "child").read_text())
    wait_for(lambda: not is_alive(child))


def test_a_report_is_written_before_whoever_sends_it_to_mlflow_gives_up() -> None:
    assert op_hooks.TIME_S < op_hooks.TOTAL_S < publisher.REPORT_WITHIN_S


def test_the_parts_of_nodes_end_where_the_page_would_grow_too_large_and_the_rest_is_named() -> None:
    names = [f"n{place}" for place in range(100)]
    text = limited(names, lambda name: Markup("x" * (MOST_TEXT // 10)))
    assert 11 == text.count("<h3>")
    assert "to keep the page small: n11, n12" in text
    assert "n30 and 69 more" in text
    assert len(text) < MOST_TEXT * 1.2


def test_what_is_embedded_has_a_limit_of_its_own_and_leaves_nothing_else_out() -> None:
    text = limited(["a", "b"], lambda name: render("frame", "<p>" * MOST_TEXT, name, 480))
    assert 2 == text.count("<h3>")


def test_a_table_has_a_limit_of_rows_and_counts_the_others() -> None:
    text = table(("a", "b"), [(place, place) for place in range(MOST_ROWS + 7)])
    assert MOST_ROWS == text.count("<tr><td")
    assert "and 7 more rows" in text
    assert "more rows" not in table(("a",), [(place,) for place in range(MOST_ROWS)])


def test_a_node_that_logs_very_many_figures_has_a_small_picture_of_the_main_ones(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    point = facts.nodes["filter"].events.points[0]
    many = {f"many/m{place:04d}": 1.0 for place in range(90)}
    facts.nodes["filter"].events.points.extend(Point(point.time, step, many) for step in (7, 8))
    assert ['alt="tau, train/loss over steps"'] * 2 == re.findall('alt="[^"]*"', curves(facts))
    facts.nodes["filter"].events.points[:] = [Point(1.0, step, many) for step in (7, 8)]
    shown = re.findall('alt="([^"]*)"', curves(facts))
    assert "many/m0000, many/m0001, many/m0002 over steps" == shown[1], "without a known name the first ones"


def test_of_very_many_nodes_with_curves_the_first_are_drawn_and_the_others_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_DRAWN", 1)
    text = curves(facts_of(tmp_path))
    assert 1 == text.count("<img")
    assert "to keep the page small: filter" in text


def test_what_nodes_used_of_the_machine_is_left_to_mlflow(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    for node in facts.nodes.values():
        node.events.points.clear()
        for second in (100.0, 110.5):
            used = System(metrics={"memory_usage_megabytes": 5.0})
            node.events.add(Event(time=second, node=node.id, attempt=1, body=used))
    assert "" == curves(facts)


def facts_of(folder: Path) -> RunFacts:
    """A run of two nodes that log curves."""
    toy = counting(folder)
    run(toy)
    store = Store.open(toy.store, write=False)
    return read_runs(store, find_records(store.records, []))[0]


def test_a_figure_that_is_nan_in_both_runs_is_the_same() -> None:
    text = figures_table([("one", {"a": NAN, "b": 1.0}), ("other", {"a": NAN, "b": 2.0})], is_one=False)
    assert "nan" in text and "+nan" not in text
    assert 1 == text.count('class="change"')
