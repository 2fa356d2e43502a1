"""Eight runs that start at once on a store that is not there yet, MLflow's database included."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing

import pytest
from toy_ops import PIPELINE, Toy

from dsl.files import read_lines

RUNS = 8


@pytest.mark.timeout(600)
def test_eight_runs_at_once_compute_every_key_once_and_all_succeed(tmp_path):
    toy = Toy(tmp_path, PIPELINE, tracked=True)
    commands = [toy.start("run", str(toy.file)) for _ in range(RUNS)]
    ended = [(command.communicate(timeout=500), command.returncode) for command in commands]
    assert [0] * RUNS == [code for _, code in ended], [said for said, code in ended if code]
    assert {"make": 1, "upper": 1, "join": 1, "steps": 1} == Counter(toy.calls())
    indexed = {path.name: len(read_lines(path)) for path in (toy.store / "index").iterdir()}
    assert [1] * 4 == list(indexed.values())
    assert RUNS == len(list(toy.store.glob("records/*/events.jsonl")))
    assert [] == list((toy.store / "work").iterdir())
    # Every node was computed for one run and tracked with it; the others name that one. A run that finds the database
    # locked for too long on a busy machine says how it is sent.
    for (_, errors), _ in ended:
        for command in re.findall(r"`dflow (sync \S+)`", errors):
            assert toy.dflow(*command.split()).returncode == 0
    with closing(sqlite3.connect(toy.store / "mlflow.db")) as database:
        rows = database.execute("select key, value from tags where key = 'dflow.cache'").fetchall()
    assert 4 == sum(value == "miss" for _, value in rows)
