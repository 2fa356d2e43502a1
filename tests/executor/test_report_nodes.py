"""The report's part on nodes and their times: what was cached, what was resumed, and where the picture stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_report import PIPELINE, counting, report, run

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
