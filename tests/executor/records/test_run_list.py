"""The table of `dflow runs`."""

from __future__ import annotations

from executor.records.run_list import RunRow, runs_text

COMMON = [f"capture.a_long_name_of_a_field_{number}=1024" for number in range(4)]


def row(run: str, *values: str) -> RunRow:
    return RunRow(
        run=run,
        pipeline="chats",
        status="done",
        started=0.0,
        seconds=1.0,
        nodes=1,
        ran=1,
        cached=0,
        failed=0,
        tags=[],
        draft="",
        tau={},
        name="",
        set=[*COMMON, *values],
    )


def test_the_values_in_which_runs_differ_stand_first_and_are_not_cut_off() -> None:
    header, *lines = runs_text([row("c", "train.lr=0.1"), row("b", "train.lr=0.2"), row("a")]).splitlines()
    shown = [line[header.index("set") :].split(",")[0] for line in lines]
    assert ["train.lr=0.1", "train.lr=0.2", COMMON[0]] == shown


def test_the_values_of_a_single_run_stand_as_they_were_given() -> None:
    _, line = runs_text([row("a", "train.lr=0.1")]).splitlines()
    assert COMMON[0] in line and "train.lr" not in line
