"""Units of a capture pool: the same bytes whoever answers and is lost, in the order of the training, and bounded."""

import random
import select
import signal
import socket
import threading
import time
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from fake_stage import FakeStage
from pool_cases import CPU, FACTS, INFO, LENGTHS, SECRET, How, numbered, rendezvous, workers_of

from dsl.errors import ConfigError, DataError
from ops.lib.stream.frames import Frames
from ops.lib.stream.handshake import answer_greeting, greet
from ops.lib.stream.rendezvous import connect, listen
from ops.lib.target.float8 import Float8States
from ops.train_dflash import capture_pool
from ops.train_dflash.batches import Rows
from ops.train_dflash.capture_pool import CapturePool, Counters, described, tensors_of
from ops.train_dflash.capture_worker import serve
from ops.train_dflash.online import RowStates

ROWS = [Rows(3, 1, 4), Rows(0, 0, 5), Rows(1, 2, 2), Rows(2, 3, 4)]


def units(count):
    """Requests of one or several samples of both splits."""
    chance = random.Random(0)
    return [("val", [Rows(0, 0, 6)]) if n % 5 == 4 else ("train", chance.sample(ROWS, n % 4 + 1)) for n in range(count)]


def pool_of(folder, stage=None, info=INFO, facts=FACTS, workers=3):
    return CapturePool(stage or FakeStage(folder / "rank"), rendezvous(folder, workers), info, LENGTHS, facts)


def until(happened):
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def same(one, other):
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs) and one.errors == other.errors


@pytest.mark.parametrize(
    "hows",
    [
        [How()],
        [How(), How(), How()],
        [How(dies_in=3), How()],
        [How(tears=2), How(dies_in=5), How()],
        [How(never_listens=True), How()],
    ],
    ids=["one", "three", "killed in compute", "killed in an answer", "killed before its file"],
)
def test_units_are_the_same_bytes_from_any_workers_of_which_some_are_killed(tmp_path, hows):
    asked = units(24)
    lost = sum(bool(how.dies_in or how.tears) for how in hows)
    left = len(hows) - lost - sum(how.never_listens for how in hows)
    hows = [attrs.evolve(how, seconds=0.03, after=0 if how.dies_in or how.tears else lost) for how in hows]
    with workers_of(tmp_path, *hows) as workers:
        workers.wait_for(left + lost)
        with pool_of(tmp_path) as pool:
            waits = [pool.ask(split, rows) for split, rows in asked]
            got = {number: waits[number]() for number in random.Random(1).sample(range(24), 24)}
            until(lambda: pool.metrics()["stream/workers"] == left)
            assert (pool.metrics()["stream/asked_again"] > 0) == bool(lost)
    assert all(same(numbered(*asked[number]), got[number]) for number in range(24))


def test_all_workers_are_killed_and_one_that_comes_later_answers_the_rest(tmp_path):
    asked = units(12)
    with workers_of(tmp_path, How(dies_in=2), How(dies_in=3)) as workers, pool_of(tmp_path) as pool:
        waits = [pool.ask(split, rows) for split, rows in asked]
        for process in workers.processes:
            process.join(120)
        assert [-signal.SIGKILL] * 2 == [process.exitcode for process in workers.processes]
        workers.start()
        assert all(same(numbered(*each), wait()) for each, wait in zip(asked, waits, strict=True))


def test_a_worker_that_hangs_is_reported_and_its_units_are_asked_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(capture_pool, "HUNG_AFTER_S", 3.0)
    with workers_of(tmp_path, How(stops_in=2)) as workers, pool_of(tmp_path) as pool:
        waits = [pool.ask("train", ROWS) for _ in range(4)]
        until((workers.place.folder / "0-0.hung").exists)
        monkeypatch.setattr(capture_pool, "HUNG_AFTER_S", 600.0)
        workers.start()
        assert all(same(numbered("train", ROWS), wait()) for wait in waits)
        workers.processes[0].kill()


def test_an_error_of_a_worker_reaches_the_rank_with_its_text_and_ends_the_worker(tmp_path):
    with workers_of(tmp_path, How(fails_in=2)) as workers, pool_of(tmp_path) as pool:
        waits = [pool.ask("train", ROWS) for _ in range(3)]
        with pytest.raises(dist.DistNetworkError, match="pool worker 0-0 failed: DataError: a shard is damaged"):
            [wait() for wait in waits]
        workers.processes[0].join(120)
        assert 1 == workers.processes[0].exitcode


def test_a_worker_that_computes_something_else_is_refused_with_what_differs(tmp_path):
    refused = pytest.raises(ConfigError, match="pool worker 0-0: target: other there, t here")
    with workers_of(tmp_path, How(facts={"target": "other"})), pool_of(tmp_path) as pool, refused:
        pool.ask("train", ROWS)()


def test_a_stop_without_any_worker_is_obeyed_at_once_and_the_wait_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capture_pool, "SAY_EVERY_S", 0.1)
    stage = FakeStage(tmp_path / "rank", stop_after=3)
    with pool_of(tmp_path, stage) as pool, pytest.raises(dist.DistNetworkError, match="stopped while no pool worker"):
        pool.ask("train", ROWS)()
    assert "info: no pool worker is connected; the training has waited for " in capsys.readouterr().out


def test_a_stranger_that_announces_itself_is_not_used(tmp_path):
    place = rendezvous(tmp_path, 2, worker=0)

    def stranger(listening):
        connected, _ = listening.accept()
        frames = Frames(connected)
        with pytest.raises(OSError):
            greet(frames, bytes(32), FACTS)
        frames.close()

    with listen(place) as listening, pool_of(tmp_path, workers=2) as pool:
        thread = threading.Thread(target=stranger, args=(listening,))
        thread.start()
        thread.join(120)
        wait = pool.ask("train", ROWS)
        ScriptedWorker(attrs.evolve(place, worker=1), None, random.Random(0))  # found after the stranger
        assert same(numbered("train", ROWS), wait())
        assert pool.metrics()["stream/workers"] == 1


class ScriptedWorker:
    """A worker without a target in a thread: it answers its requests in any order, then breaks the connection.

    answers: how many units it answers before; None: all.
    """

    def __init__(self, place, answers, chance, wrong=None):
        self._listening = listen(place)
        self._answers, self._chance, self._wrong = answers, chance, wrong
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with self._listening:
            connected, _ = self._listening.accept()
        with connected:
            frames = Frames(connected)
            greet(frames, bytes.fromhex(SECRET), {**FACTS, "device": "cpu"})
            waiting = []
            try:
                while self._answers is None or self._answers > 0:
                    waiting.append(frames.receive())
                    while select.select([connected], [], [], 0.02)[0]:
                        waiting.append(frames.receive())
                    self._chance.shuffle(waiting)
                    while waiting and (self._answers is None or self._answers > 0):
                        self._answer(frames, waiting.pop())
            except OSError:  # the rank has ended
                pass

    def _answer(self, frames, request):
        states = numbered(request["split"], [Rows(*row) for row in request["rows"]])
        head = {"unit": request["unit"], "tensors": described(states), "errors": [], "counters": {}}
        frames.send({**head, **(self._wrong or {})}, tensors_of(states))
        if self._answers is not None:
            self._answers -= 1


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_of_answers_losses_and_joins_changes_what_a_rank_gets(tmp_path, seed):
    chance = random.Random(seed)
    asked = units(chance.randint(5, 30))
    workers = chance.randint(1, 4)
    with pool_of(tmp_path, workers=workers) as pool:
        waits, got, start = [], [], 0
        for number, (split, rows) in enumerate(asked):
            if number % chance.randint(1, 6) == 0:
                place = attrs.evolve(rendezvous(tmp_path, workers), worker=chance.randrange(workers), start=start)
                ScriptedWorker(place, chance.randint(0, 6), chance)
                start += 1
            waits.append(pool.ask(split, rows))
        ScriptedWorker(attrs.evolve(rendezvous(tmp_path, workers), worker=0, start=start), None, chance)
        got = [wait() for wait in waits]
    assert all(same(numbered(*each), states) for each, states in zip(asked, got, strict=True))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"tensors": [["bfloat16", [8, 6]], ["bfloat16", [25, 3]]]}, r"answered .*\[8, 6\].* samples \[3, 0, 1, 2\]"),
        ({"unit": 99}, "answered unit 99, which it was not asked"),
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_an_error_never_a_sample_less(tmp_path, wrong, expected):
    ScriptedWorker(rendezvous(tmp_path, 1, worker=0), None, random.Random(0), wrong)
    with pool_of(tmp_path) as pool, pytest.raises(DataError, match=expected):
        pool.ask("train", ROWS)()


class Counted:
    """A worker in a thread that counts its units, with states of 4 MB or of float8."""

    def __init__(self, folder, states):
        self.units = 0
        self.stage = FakeStage(folder / "worker", pool=rendezvous(folder, 1, worker=0))
        self._states = states
        arguments = (self._take, self.stage, self.stage.pool, FACTS, CPU)
        self.thread = threading.Thread(target=serve, args=arguments, daemon=True)
        self.thread.start()

    def _take(self, split, rows):
        self.units += 1
        return self._states(split, rows)

    def end(self):
        self.stage.stop_after = 0
        self.thread.join(120)
        assert not self.thread.is_alive()
        until(lambda: not any("(accept)" in each.name for each in threading.enumerate()))


def test_a_worker_whose_answers_nobody_reads_computes_no_more_than_it_keeps(tmp_path):
    worker = Counted(tmp_path, lambda _split, _rows: RowStates(torch.zeros(1024, 1024), None))
    place = rendezvous(tmp_path)
    until((place.folder / "0-0.json").exists)
    with connect(place, "0-0") as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frames = Frames(connected)
        answer_greeting(frames, bytes.fromhex(SECRET), FACTS)
        for unit in range(8):
            frames.send({"unit": unit, "split": "train", "rows": [[0, 0, 5]]})
        until(lambda: 2 == worker.units)
        for _ in range(10):
            time.sleep(0.1)  # if this process stands still, one of them ends at once and not all
        assert 2 == worker.units
        read = torch.empty(1024, 1024)
        for unit in range(8):
            head = frames.receive()
            assert unit == head["unit"]
            frames.receive_into(read)
        assert head["counters"]["blocked"] > 0.5
        assert 8 == worker.units
    worker.end()


def test_float8_states_their_scales_and_errors_come_back(tmp_path):
    def encoded(split, rows):
        states = numbered(split, rows)
        features, hidden = Float8States.encode(states.features, 2), Float8States.encode(states.final_hidden, 1)
        return RowStates(features, hidden, (0.5, 0.25, 0.125))

    worker = Counted(tmp_path, encoded)
    with pool_of(tmp_path, info=INFO | {"feature_dtype": "float8"}) as pool:
        assert same(encoded("train", ROWS), pool.ask("train", ROWS)())
    worker.end()


def test_counters_of_a_worker_that_was_started_again_begin_anew():
    before, after = Counters(tokens=10, seconds=8.0, busy=4.0), Counters(tokens=16, seconds=10.0, busy=5.0)
    assert Counters(tokens=6, seconds=2.0, busy=1.0) == after.since(before)
    assert before == before.since(after)


def test_the_sentence_at_the_end_names_the_side_that_waited_and_the_number_of_workers_that_would_keep_up(tmp_path):
    with pool_of(tmp_path, workers=2) as pool:
        for busy, waited, expected in ((9.5, 0.6, "5 workers"), (2.0, 0.0, "1 worker"), (10.0, 0.0, "2 workers")):
            worker = capture_pool._Worker("0-0", None, 0, counters=Counters(tokens=1, seconds=10.0, busy=busy))
            pool._workers = {"0-0": worker}
            assert f": {expected} would keep up" in pool.balance(waited)
        pool._workers = {}


def test_no_descriptor_is_left_when_a_pool_is_closed(tmp_path):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    worker = Counted(tmp_path, numbered)
    with pool_of(tmp_path) as pool:
        pool.ask("train", ROWS)()
    before = descriptors()
    for _ in range(3):
        with pool_of(tmp_path) as pool:
            pool.ask("train", ROWS)()
    until(lambda: descriptors() <= before)
    worker.end()
