"""Reading ahead: order, errors at their place, a bounded lead, an end, and a consumer that keeps its threads."""

import itertools
import threading
import time

import pytest
import torch

from ops.train_dflash.prefetch import AHEAD_BYTES, Prefetch

PATIENCE_S = 120.0
STILL_S = 0.5  # more than two polls of a full queue


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("Thread-") and thread.daemon]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = readers()
    yield
    assert set(readers()) <= set(before)  # of the others some may have ended


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_in_order_and_the_end_stays_the_end(depth):
    with Prefetch(iter(range(20)), depth) as ahead:
        assert list(range(20)) == list(ahead)
        assert [] == list(ahead)
    with Prefetch([], depth) as ahead:
        assert [] == list(ahead)


def test_an_error_is_raised_behind_the_items_before_it_and_by_every_later_call():
    def items():
        yield "a"
        yield "b"
        raise OSError("the shard is gone")

    with Prefetch(items()) as ahead:
        assert ["a", "b"] == [next(ahead), next(ahead)]
        for _ in range(3):
            with pytest.raises(OSError, match="the shard is gone"):
                next(ahead)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_than_depth_and_one_items_are_made_ahead_of_the_consumer(depth):
    made = []

    def items():
        for number in itertools.count():
            made.append(number)
            yield number

    with Prefetch(items(), depth) as ahead:
        for taken in range(3):
            wait_for(lambda taken=taken: len(made) >= taken + depth + 1)
            assert taken + depth + 1 == len(made)
            assert taken == next(ahead)
        wait_for(lambda: len(made) >= 3 + depth + 1)
        time.sleep(STILL_S)
        assert 3 + depth + 1 == len(made)


@pytest.mark.parametrize(
    ("size", "ahead"), [(AHEAD_BYTES + 1, 1), (AHEAD_BYTES // 2 + 1, 2), (AHEAD_BYTES // 2, 3), (1, 4)]
)
def test_large_items_wait_in_smaller_numbers(size, ahead):
    made = []

    def items():
        for number in itertools.count():
            made.append(number)
            yield number

    with Prefetch(items(), 3, lambda _item: size) as prefetch:
        for taken in range(3):
            wait_for(lambda taken=taken: len(made) >= taken + ahead)
            time.sleep(STILL_S)
            assert taken + ahead == len(made)
            assert taken == next(prefetch)


def test_closing_ends_the_thread_while_the_queue_is_full_and_closes_what_it_read_from():
    made, closed = [], threading.Event()

    def items():
        try:
            for number in itertools.count():
                made.append(number)
                yield number
        finally:
            closed.set()

    ahead = Prefetch(items(), 2)
    wait_for(lambda: len(made) == 3)
    ahead.close()
    assert closed.wait(PATIENCE_S)
    assert 3 == len(made)
    ahead.close()


def test_an_error_of_the_consumer_ends_the_thread_as_well():
    with pytest.raises(KeyError), Prefetch(itertools.count()) as ahead:
        next(ahead)
        raise KeyError


def test_the_reader_computes_on_one_thread_and_the_consumer_keeps_all_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Prefetch(torch.get_num_threads() for _ in range(2)) as ahead:
            assert [1, 1] == list(ahead)
            assert 3 == torch.get_num_threads()
        assert 3 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
