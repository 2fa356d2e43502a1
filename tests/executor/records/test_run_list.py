"""The table of `dflow runs`."""

from __future__ import annotations

from executor.records.run_list import RunRow, runs_text

SHARED = [f"regenerate.finish_reasons={number}" for number in range(5)]  # longer than what is shown


def row(run: str, given: list[str]) -> RunRow:
    counts = {"nodes": 1, "ran": 1, "cached": 0, "failed": 0}
    texts = {"run": run, "pipeline": "p", "status": "done", "draft": "", "name": "", "tags": []}
    return RunRow(**texts, **counts, started=0.0, seconds=1.0, tau={}, set=given)


def test_the_values_in_which_runs_differ_stand_before_those_that_all_share() -> None:
    text = runs_text([row("b", [*SHARED, "train.lr=0.1"]), row("a", [*SHARED, "train.lr=0.2"])])
    _, newer, older = text.splitlines()
    assert "train.lr=0.1, regenerate.finish_reasons=0" in newer
    assert "train.lr=0.2, regenerate.finish_reasons=0" in older
