"""Which points of a node's events go to MLflow: whatever was cut and done again, steps never go backwards."""

from hypothesis import given
from hypothesis import strategies as st

from executor.records.events import Cut, Event, Metric, NodeChange, NodeEvents


def metric(step, time=0.0, **metrics):
    return Event(time, "d", 1, Metric(step, metrics or {"loss": 1 / (step + 1)}))


def cut(step):
    return Event(0.0, "d", 1, Cut(step))


def begin(key, cache):
    return Event(0.0, "d", 1, NodeChange(state="running", key=key, cache=cache))


def added(*events):
    found = NodeEvents()
    for event in events:
        found.add(event)
    return found


def steps(found, name="loss"):
    return [point.step for point in found.points if name in point.metrics]


@st.composite
def attempts(draw):
    """Events of a resumable op of one key that is killed at any step and goes on from any place it saved before."""
    events, reached = [begin("k", "miss")], 0
    for share, length in draw(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=6)):
        place = int(share * reached)
        if reached:
            events += [begin("k", "resumed"), cut(place)]
        events += [metric(step, float(len(events) + step)) for step in range(place, place + length)]
        reached = max(reached, place + length)
    return reached, events


@given(attempts())
def test_each_step_is_there_once_and_steps_only_rise(drawn):
    last, events = drawn
    found = added(*events)
    assert steps(found) == list(range(last))
    assert found.restarts == 0


@given(attempts())
def test_what_was_sent_stays_the_beginning_of_what_is_to_be_sent(drawn):
    _, events = drawn
    whole = added(*events).points
    for end in range(len(events)):
        begun = added(*events[:end]).points
        assert begun == whole[: len(begun)]


def test_metrics_of_one_step_are_told_apart_by_name():
    found = added(
        metric(0, loss=1.0), metric(0, tau=2.0), metric(1, loss=0.5), cut(0), metric(0, loss=1.0, tau=2.0, new=3.0)
    )
    assert [dict(point.metrics) for point in found.points] == [{"loss": 1.0}, {"tau": 2.0}, {"loss": 0.5}, {"new": 3.0}]


def test_of_measured_values_the_first_counts():
    found = added(metric(0, seconds=1.0), cut(0), metric(0, seconds=2.0), metric(1, seconds=2.5))
    assert [dict(point.metrics) for point in found.points] == [{"seconds": 1.0}, {"seconds": 2.5}]


def test_an_op_may_log_one_step_twice_within_an_attempt():
    assert steps(added(metric(3), metric(3), metric(4))) == [3, 3, 4]


def test_other_code_that_starts_from_nothing_has_points_of_its_own():
    found = added(begin("k", "miss"), metric(0), metric(1), metric(2), begin("other", "miss"), metric(0, loss=9.0))
    assert [(point.step, point.metrics["loss"]) for point in found.points] == [(0, 9.0)]
    assert found.restarts == 1


def test_other_code_that_goes_on_with_adopted_work_keeps_the_points_before_the_cut():
    earlier = [begin("k", "miss"), metric(0), metric(1), metric(2)]
    found = added(*earlier, begin("other", "resumed"), cut(1), metric(1, loss=9.0), cut(1), metric(1), metric(2))
    assert [(point.step, point.metrics["loss"]) for point in found.points] == [(0, 1.0), (1, 9.0), (2, 1 / 3)]
    assert found.restarts == 1
