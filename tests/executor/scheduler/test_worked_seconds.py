"""How long a run was worked on."""

from executor.records.events import Accepted, Event, Metric, RunChange, worked_seconds


def run(time: float, state: str) -> Event:
    return Event(time, "", 0, RunChange(state))


def metric(time: float) -> Event:
    return Event(time, "a", 1, Metric(1, {}))


def accepted(time: float) -> Event:
    return Event(time, "a", 1, Accepted(key="k"))


def test_the_time_between_an_end_and_the_resumption_is_no_work() -> None:
    first = [run(10.0, "started"), metric(12.0), run(15.0, "stopped")]
    second = [run(1000.0, "started"), run(1001.5, "done")]
    assert 6.5 == worked_seconds([*first, accepted(500.0), *second])


def test_what_was_killed_was_worked_on_until_its_last_event() -> None:
    killed = [run(10.0, "started"), metric(14.0), accepted(90.0)]
    assert 4.0 == worked_seconds(killed)
    assert 5.0 == worked_seconds([*killed, run(100.0, "started"), run(101.0, "done")])


def test_a_clock_that_goes_back_takes_nothing_off() -> None:
    assert 2.0 == worked_seconds([run(10.0, "started"), metric(12.0), run(3.0, "done")])
    assert 0.0 == worked_seconds([])


def test_a_run_in_progress_is_worked_on_until_now() -> None:
    resumed = [run(10.0, "started"), run(15.0, "stopped"), run(100.0, "started"), metric(103.0)]
    assert 5.0 + 7.0 == worked_seconds(resumed, until=107.0)
    assert 5.0 == worked_seconds(resumed[:2], until=107.0)
