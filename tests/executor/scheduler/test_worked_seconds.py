"""How long a run was worked on."""

from typing import Any

from executor.records.events import worked_seconds


def event(time: float, kind: str, state: str = "") -> dict[str, Any]:
    return {"time": time, "node": "" if kind == "run" else "a", "kind": kind, "state": state}


def test_the_time_between_an_end_and_the_resumption_is_no_work() -> None:
    first = [event(10.0, "run", "started"), event(12.0, "metric"), event(15.0, "run", "stopped")]
    second = [event(1000.0, "run", "started"), event(1001.5, "run", "done")]
    assert 6.5 == worked_seconds([*first, event(500.0, "accepted"), *second])


def test_what_was_killed_was_worked_on_until_its_last_event() -> None:
    killed = [event(10.0, "run", "started"), event(14.0, "metric"), event(90.0, "accepted")]
    assert 4.0 == worked_seconds(killed)
    assert 5.0 == worked_seconds([*killed, event(100.0, "run", "started"), event(101.0, "run", "done")])


def test_a_clock_that_goes_back_takes_nothing_off() -> None:
    assert 2.0 == worked_seconds([event(10.0, "run", "started"), event(12.0, "metric"), event(3.0, "run", "done")])
    assert 0.0 == worked_seconds([])
