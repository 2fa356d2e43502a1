"""The live view of a node: how far it is, how fast, and for how long still."""

from __future__ import annotations

from executor.records.events import Event, Metric, Progress
from executor.results.run_table import Live


def shown(*bodies: tuple[float, Metric | Progress]) -> Live:
    live = Live()
    for time, body in bodies:
        live.add(Event(time, "train", 1, body))
    return live


def test_a_training_shows_its_step_its_speed_the_time_left_and_its_loss() -> None:
    loss = Metric(40, {"train/loss": 2.5, "train/lr": 0.001})
    live = shown((0.0, Progress(20, 200)), (10.0, Progress(40, 200)), (10.0, loss))
    assert "40 of 200, 2/s, 1 min 20 s left: train/loss 2.5, train/lr 0.001" == str(live)
    assert "40 of 200: train/loss 2.5, train/lr 0.001" == live.reached_with_metrics


def test_slow_steps_are_shown_by_their_seconds() -> None:
    assert "3 of 5, 4 s each, 8.0 s left" == str(shown((0.0, Progress(1, 5)), (8.0, Progress(3, 5))))


def test_the_speed_is_that_of_the_last_reports_and_of_one_count() -> None:
    slow_start = [(0.0, Progress(0, 100)), *((1000.0 + step, Progress(step, 100)) for step in range(1, 51))]
    assert "50 of 100, 1/s, 50.0 s left" == str(shown(*slow_start))
    again = shown((0.0, Progress(0, 9)), (1.0, Progress(9, 9)), (5.0, Progress(0, 4)), (6.0, Progress(2, 4)))
    assert "2 of 4, 2/s, 1.0 s left" == str(again)


def test_nothing_is_said_that_is_not_known() -> None:
    assert "" == str(Live())
    assert "1 of 4" == str(shown((0.0, Progress(1, 4))))
    assert "2 of 4" == str(shown((0.0, Progress(1, 4)), (0.0, Progress(2, 4))))
    assert "4 of 4" == str(shown((0.0, Progress(1, 4)), (1.0, Progress(4, 4))))
    assert "loss 2" == str(shown((0.0, Metric(1, {"loss": 2.0}))))
