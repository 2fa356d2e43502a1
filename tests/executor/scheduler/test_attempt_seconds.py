"""How long a node took: all attempts whose work is in its artifact, failed and killed ones, of earlier runs too."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import pytest
from stage_processes import stage_pids
from toy_ops import wait_for
from tracked_toy import child, newest_record, send, tracked_toy

from dsl.files import read_lines
from executor.store.artifact_store import Store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SLOW = ("-s", "d.steps=600", "-s", "d.seconds=0.05")


def lines_of(record):
    return [line for line in read_lines(record / "events.jsonl") if line["node"] == "d"]


def reported(record):
    """The steps of the newest attempt that are in a record by now."""
    lines = lines_of(record) if (record / "events.jsonl").exists() else []
    begun = [line["started"] for line in lines if line.get("state") == "running"]
    return sum(line["kind"] == "metric" and line["time"] > begun[-1] for line in lines) if begun else 0


def kill_in_the_middle(toy, *command):
    before = set(toy.store.glob("records/*"))
    process = toy.start(*command)
    wait_for(lambda: any(reported(record) >= 8 for record in set(toy.store.glob("records/*")) - before))
    stages = stage_pids(toy)
    process.kill()
    for pid in stages:
        with suppress(ProcessLookupError):  # it ended with the executor
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_the_seconds_of_a_node_are_those_of_all_attempts_that_made_its_artifact(tmp_path):
    toy = tracked_toy(tmp_path, tracked=False)
    assert 1 == toy.dflow("run", str(toy.file), *SLOW, "-s", "d.fail_at=10").returncode
    first = newest_record(toy)
    failed = next(line for line in lines_of(first) if line.get("state") == "failed")
    assert failed["seconds"] > 0.4
    assert "attempt_seconds" not in failed
    kill_in_the_middle(toy, "run", str(toy.file), *SLOW)
    record = newest_record(toy)
    assert first != record
    killed = lines_of(record)
    started = next(line["started"] for line in killed if line.get("state") == "running")
    lost = max(line["time"] for line in killed if line["kind"] in ("progress", "metric")) - started
    assert lost > 0.3
    (tmp_path / "end").touch()
    assert 0 == toy.dflow("resume").returncode
    done = lines_of(record)[-1]
    assert ("done", "resumed") == (done["state"], done["cache"])
    again = [line["started"] for line in lines_of(record) if line.get("state") == "running"][-1]
    assert 0 < done["attempt_seconds"] <= done["time"] - again
    assert done["seconds"] == pytest.approx(failed["seconds"] + lost + done["attempt_seconds"], abs=0.05)
    status = json.loads(toy.dflow("status", "--json").stdout)
    assert done["seconds"] == next(node["seconds"] for node in status["nodes"] if node["id"] == "d")
    manifest = Store(toy.store).manifest(done["digest"])
    assert manifest is not None
    assert done["seconds"] == manifest.seconds
    send(toy, record)
    run = child(toy, record, "d").info
    assert done["seconds"] == pytest.approx((run.end_time - run.start_time) / 1000, abs=0.01)
    assert not list((toy.store / "work").glob("*/work.json"))
