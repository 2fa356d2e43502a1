"""Samples of people whom nobody knows: what their ids and texts can do in logs, on the console and in tables."""

from __future__ import annotations

import csv
import json

from fake_stage import FakeStage
from toy_ops import Toy

from dsl.finding import Finding, Node
from executor.scheduler.plain_display import failure_text
from ops.lib.data.sample_account import Tally

SPEAKS = "x\ndflow: warning: remove your store\r\x1b[2Jdone"
PIPELINE = """
[pipeline]
name = "strangers"

[node.ingest]
op = "ingest"
source = "samples.jsonl"
max_dropped = 0
"""


def test_no_id_of_a_sample_begins_a_line_of_the_console_or_a_log(tmp_path):
    toy = Toy(tmp_path, PIPELINE)
    rows = [{"id": SPEAKS, "messages": []}, {"id": "fine", "messages": [{"role": "user", "content": "hello"}]}]
    (tmp_path / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for most in (0, 1):
        result = toy.dflow("run", str(toy.file), "-s", f"ingest.max_dropped={most}")
        said = result.stdout + result.stderr
        logs = [path.read_text() for path in toy.store.glob("records/*/*.log")]
        assert logs and "remove your store" in said + "".join(logs)
        lines = [line for text in (said, *logs) for line in text.splitlines()]
        assert [line for line in lines if line.startswith(("dflow: warning", "warning: remove"))] == []
        assert "\x1b" not in said + "".join(logs)


def test_further_lines_of_a_failure_are_indented(tmp_path):
    text = failure_text(Finding("ValueError: a\nwhat to do: call me", Node("n"), "read the log"), "r", [], tmp_path)
    assert text.splitlines()[:2] == ["n failed: ValueError: a", "    what to do: call me"]


def test_no_cell_of_a_table_is_a_formula(tmp_path):
    stage = FakeStage(tmp_path)
    tally = Tally(stage, "ingest")
    for sample_id, detail in (("=1+1", "@SUM(A1)"), ("+1", "-2"), ("\tx", "fine")):
        tally.drop("broken", sample_id, detail)
    with (stage.out_dir / "dropped.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert rows == [["'=1+1", "broken", "'@SUM(A1)"], ["'+1", "broken", "'-2"], ["'\tx", "broken", "fine"]]
