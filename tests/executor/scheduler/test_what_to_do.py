"""What to do about a failed node is found once, and known the next morning: by `status`, the report and MLflow."""

from __future__ import annotations

import html
import json
import os
import signal

import pytest
from stage_processes import stage_pids
from toy_ops import wait_for
from tracked_toy import child, newest_record, tracked_toy

from dsl.files import compact, read_lines
from dsl.finding import Finding, Node
from executor.records.run_record import Record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_what_to_do_about_a_killed_stage_is_told_everywhere_and_later(tmp_path):
    toy = tracked_toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.steps=600", "-s", "d.seconds=0.1")
    wait_for(lambda: len(toy.steps()) >= 1)
    os.kill(stage_pids(toy)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    record = newest_record(toy)
    found = Record.load(record).state.nodes["d"].failure
    assert found is not None
    assert (Node("d"), "killed", "error") == (found.where, found.code, found.level)
    assert "ran out of memory, or the process was killed (see `dmesg`)" in found.advice
    assert f"\n  what to do: {found.advice}\n" in errors
    shown = toy.dflow("status").stdout
    assert f"d failed: {found.what}\n  what to do: {found.advice}\n" in shown
    rows = {row["id"]: row for row in json.loads(toy.dflow("status", "--json").stdout)["nodes"]}
    assert (found.what, found.advice) == (rows["d"]["reason"], rows["d"]["advice"])
    assert toy.dflow("report", "-o", str(tmp_path / "report.html")).returncode == 0
    page = html.unescape((tmp_path / "report.html").read_text())
    assert f"d failed: {found.what}\n  what to do: {found.advice}</pre>" in page
    tags = child(toy, record, "d").data.tags
    assert (found.what, found.advice) == (tags["dflow.error"], tags["dflow.what_to_do"])


def test_a_failure_that_a_version_before_recorded_is_still_shown(tmp_path):
    toy = tracked_toy(tmp_path)
    toy.tracked = False
    assert toy.dflow("run", str(toy.file), "-s", "d.fail_at=1").returncode == 1
    log = next(toy.store.glob("records/*/events.jsonl"))
    lines = [line for line in read_lines(log) if line["kind"] in ("run", "state")]
    for line in lines:
        if "failure" in line:
            line["error"] = line.pop("failure")["what"]
    older = [line if line["node"] else {"run": line} for line in lines]
    (log.parent / "state.jsonl").write_bytes(b"".join(map(compact, older)))
    failure = Record.load(log.parent).state.nodes["d"].failure
    assert Finding("DataError: line 3 of the data is broken", Node("d")) == failure
    assert "d failed: DataError: line 3 of the data is broken" in toy.dflow("status").stdout
