"""A node's full time is told from the times of its trial's progress; here those times are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.estimate import Amount, Growth
from executor.records.events import Event, Metric, Progress
from executor.smoke.full_run import Report, Spread, full_time, reports, series_of

START = 1000.0


def told(*times_and_counts: tuple[float, int], total: int) -> list[Report]:
    return [Report(START + seconds, done, total) for seconds, done in times_and_counts]


def full(told: list[Report], seconds: float, *series: Amount, tail: float = 1.0) -> tuple[float, float]:
    spread = full_time(START, START + seconds, told, Growth(series=series, tail=tail))
    return round(spread.low, 6), round(spread.high, 6)


@given(
    start_up=st.floats(0, 100),
    pace=st.floats(0.01, 10),
    tail=st.floats(0, 100),
    trial=st.integers(2, 30),
    full_amount=st.integers(1, 10**6),
)
def test_a_stage_of_constant_pace_takes_its_start_up_once_and_each_unit_alike(
    start_up: float, pace: float, tail: float, trial: int, full_amount: int
) -> None:
    progress = told(*((start_up + pace * done, done) for done in range(trial + 1)), total=trial)
    spread = full_time(
        START, START + start_up + pace * trial + tail, progress, Growth(series=(Amount(trial, full_amount),))
    )
    truth = start_up + pace * full_amount + tail
    assert spread.low == pytest.approx(truth, rel=1e-4, abs=1e-4)
    assert spread.high == pytest.approx(truth, rel=1e-4, abs=1e-4)


def test_what_the_first_step_takes_longer_is_taken_once() -> None:
    compiled_first = told((10, 0), (40, 1), (41, 2), (42, 3), (43, 4), total=4)
    assert (10 + 29 + 100, 10 + 29 + 100) == full(compiled_first, 43, Amount(4, 100))


def test_a_slow_step_among_others_makes_the_time_a_spread() -> None:
    saved_once = told((10, 0), (11, 1), (12, 2), (18, 3), (19, 4), total=4)
    assert (10 + 100 * 1, 10 + 100 * 9 / 4) == full(saved_once, 19, Amount(4, 100))


def test_what_was_done_before_the_first_report_is_taken_out_of_the_start_up() -> None:
    one_was_done = told((12, 1), (14, 2), (16, 3), total=3)  # ten seconds of start-up, two a unit
    assert (10 + 2 * 300, 10 + 2 * 300) == full(one_was_done, 16, Amount(3, 300))


def test_each_series_grows_by_its_own_amount_and_the_time_between_them_stays() -> None:
    steps = told((5, 0), (7, 1), (9, 2), total=2)
    answers = told((12, 0), (13, 1), (14, 2), (15, 3), total=3)
    assert [steps, answers] == series_of([*steps, *answers])
    truth = 5 + 2 * 50 + 3 + 1 * 30 + 4
    assert (truth, truth) == full([*steps, *answers], 19, Amount(2, 50), Amount(3, 30))


def test_a_series_that_nobody_declared_stays_as_it_is() -> None:
    steps = told((5, 0), (7, 1), (9, 2), total=2)
    assert (10, 10) == full(steps, 10)


def test_progress_told_at_the_end_alone_may_be_all_of_the_time_or_nothing_of_it() -> None:
    assert (1 + 9, 1 + 90) == full(told((9, 3), total=3), 10, Amount(3, 30))


def test_a_stage_without_progress_may_grow_as_a_whole_or_not_at_all() -> None:
    assert (10, 70) == full([], 10, Amount(1, 7))


def test_a_full_run_that_is_smaller_than_its_trial_is_told_to_take_less() -> None:
    assert (5, 10) == full([], 10, Amount(4, 2))


def test_what_follows_the_last_report_may_grow_too() -> None:
    steps = told((5, 0), (7, 1), (9, 2), total=2)
    assert (5 + 4 + 3, 5 + 4 + 30) == full(steps, 12, Amount(2, 2), tail=10)


def test_more_at_once_takes_less_but_not_surely() -> None:
    answers = told((5, 0), (9, 4), total=4)
    assert (5 + 4 * 2, 5 + 4 * 10) == full(answers, 9, Amount(4, 40, fewest=8))


def test_a_clock_that_went_back_makes_no_time_negative() -> None:
    spread = full_time(START, START - 50, told((5, 0), (-7, 1), (-9, 2), total=2), Growth(series=(Amount(2, 9),)))
    assert Spread(0.0, 0.0) == spread


def test_only_the_last_attempt_of_the_node_counts() -> None:
    events = [
        Event(1.0, node, attempt, Progress(done, 3) if kind == "progress" else Metric(done, {}))
        for kind, node, attempt, done in (
            ("progress", "a", 1, 1),
            ("progress", "a", 2, 2),
            ("progress", "b", 2, 3),
            ("state", "a", 2, 0),
        )
    ]
    assert [Report(1.0, 2, 3)] == reports(events, "a", 2)
