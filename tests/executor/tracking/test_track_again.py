"""Sending a run again, after whatever came between: MLflow holds each run and each point once."""

from contextlib import suppress
from unittest.mock import ANY

import pytest
from mlflow.exceptions import MlflowException
from tracked_toy import accepted, client_of, copied, history, ids, newest_record, send, tracked_toy

from dsl.files import append_line, read_json_or_none, write_json
from executor.records.run_record import Record
from executor.tracking import sync_state
from executor.tracking.replay import Replay
from executor.tracking.sync_state import lacks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LINE = {"time": 1.0, "node": "d", "attempt": 2}


class Unsent:
    """A store with a run that nothing was sent of: each test sends a copy of its own. Node d has points 0 to 19."""

    def __init__(self, toy):
        self.toy = toy
        assert toy.dflow("run", str(toy.file), "-s", "d.steps=20").returncode == 0
        self.record = newest_record(toy)
        append_line(self.record / "events.jsonl", accepted("d"))
        self.client = client_of(toy)

    def sent(self, name):
        record = copied(self.record, name)
        send(self.toy, record)
        return record

    def losses(self, record):
        return sorted((step, value) for step, value, _ in history(self.client, ids(record)[1]["d"], "steps/loss"))


@pytest.fixture(scope="module")
def unsent(tmp_path_factory):
    return Unsent(tracked_toy(tmp_path_factory.mktemp("unsent"), tracked=False))


def loss(step, value, time=1.0):
    return {**LINE, "time": time, "kind": "metric", "step": step, "metrics": {"steps/loss": value}}


def kill_the_call(unsent, record):
    """Leave a call as if killed after the points had arrived and before the child was closed."""
    unsent.client.update_run(ids(record)[1]["d"], status="RUNNING")
    write_json(record / "mlflow.json", {**read_json_or_none(record / "mlflow.json"), "events": None})


def attempt_again(record):
    """Write that the node was resumed and is done."""
    resumed = Record.load(record)
    resumed.state.nodes["d"].state, resumed.state.nodes["d"].attempt = "done", 2
    resumed.save_node("d")


def test_sending_twice_does_not_double(unsent):
    record = unsent.sent("twice")
    children, before = ids(record), unsent.losses(record)
    assert [step for step, _ in before] == list(range(20))
    kill_the_call(unsent, record)
    send(unsent.toy, record)
    assert (ids(record), unsent.losses(record)) == (children, before)


def test_points_that_a_resumed_attempt_did_again_are_there_once_in_the_same_child(unsent):
    record = unsent.sent("resumed")
    children = ids(record)
    append_line(record / "events.jsonl", {**LINE, "kind": "cut", "step": 15})
    for step in range(15, 23):
        append_line(record / "events.jsonl", loss(step, 1 / (step + 1), float(step)))
    attempt_again(record)
    send(unsent.toy, record)
    assert ids(record) == children
    assert unsent.losses(record) == [(step, 1 / (step + 1)) for step in range(23)]
    assert unsent.client.get_run(children[1]["d"]).info.status == "FINISHED"


def test_a_child_that_holds_points_of_other_code_is_made_anew(unsent):
    record = unsent.sent("other-code")
    before = ids(record)[1]["d"]
    append_line(
        record / "events.jsonl", {**LINE, "kind": "state", "state": "running", "cache": "resumed", "key": "new"}
    )
    append_line(record / "events.jsonl", {**LINE, "kind": "cut", "step": 2})
    append_line(record / "events.jsonl", loss(2, 9.0))
    attempt_again(record)
    send(unsent.toy, record)
    again = ids(record)[1]["d"]
    assert unsent.losses(record) == [(0, 1.0), (1, 0.5), (2, 9.0)]
    assert unsent.client.get_run(before).info.lifecycle_stage == "deleted"
    assert unsent.client.get_run(again).info.status == "FINISHED"


def test_points_of_a_call_that_was_killed_are_not_doubled_by_the_next_attempt(unsent):
    """The points had arrived, that they had was not put down, and then a resumed attempt made them again."""
    record = unsent.sent("killed-call")
    kill_the_call(unsent, record)
    append_line(record / "events.jsonl", {**LINE, "kind": "cut", "step": 19})
    for step in (19, 20):
        append_line(record / "events.jsonl", loss(step, 9.0))
    send(unsent.toy, record)
    assert unsent.losses(record)[18:] == [(18, 1 / 19), (19, 1 / 20), (20, 9.0)]


AFTER = "af" * 32


def test_the_key_of_a_node_that_failed_and_was_fixed_is_the_new_one(unsent):
    record = unsent.sent("fixed")
    edited = Record.load(record)
    edited.state.nodes["d"].key = AFTER
    edited.save_node("d")
    send(unsent.toy, record)
    assert unsent.client.get_run(ids(record)[1]["d"]).data.tags["dflow.key"] == AFTER


def test_an_accept_event_is_a_tag_on_the_child_that_made_the_artifact_and_is_sent_later_too(unsent):
    record = unsent.sent("accepted")
    _, children = ids(record)
    append_line(record / "events.jsonl", accepted("c"))
    assert lacks(Record.load(record))
    for _ in range(2):
        assert sync_state.send_rest(unsent.toy.store, record)[0] is None
        assert not lacks(Record.load(record))
    run = unsent.client.get_run(children["c"])
    assert run.data.tags["dflow.accepted"] == "2026-05-28 20:26:40 UTC, ann: only renamed (key kkkkkkkkkkkk)"
    assert run.info.status == "FINISHED"
    assert "dflow.accepted" not in unsent.client.get_run(children["b"]).data.tags


class Killed(BaseException):
    """Like kill -9: nobody answers it."""


class Failing:
    """A client of which one changing call raises an error after it did its work: the answer was lost."""

    def __init__(self, client, at, error):
        self._client = client
        self._left = at
        self._error = error

    def __getattr__(self, name):
        call = getattr(self._client, name)
        return call if name.startswith(("search", "get")) else lambda *a, **k: self._count(call(*a, **k))

    def _count(self, answer):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return answer


def held(client, record):
    """The content of MLflow for a run, by its tags; only ids and times of creation are left out."""
    shown = []
    for run in client.search_runs(["1"], f"tags.`dflow.run` = '{record.name}'"):
        own = {name: value for name, value in run.data.tags.items() if name in ("dflow.node", "dflow.accepted")}
        points = [history(client, run.info.run_id, name) for name in sorted(run.data.metrics)]
        inputs = [entry.dataset.name for entry in run.inputs.dataset_inputs]
        shown.append((own, run.info.status, run.data.params, points, inputs))
    return sorted(shown, key=str)


@pytest.mark.parametrize(
    ("error", "every"),
    [
        pytest.param(MlflowException("the server went away"), 7, id="away"),
        pytest.param(Killed(), 5, id="killed"),
        pytest.param(Killed(), 1, id="killed-at-every-call", marks=pytest.mark.slow),
    ],
)
def test_whatever_call_is_the_last_one_nothing_is_doubled_or_lost(unsent, error, every, monkeypatch):
    client, store, kind = unsent.client, unsent.toy.store, f"{type(error).__name__}-{every}"
    expected = held(client, unsent.sent(kind))
    assert [node for node, *_ in expected] == [
        {"dflow.node": "a"}, {"dflow.node": "b"}, {"dflow.node": "c"}, {"dflow.node": "d", "dflow.accepted": ANY}, {}
    ]  # fmt: skip
    for at in range(1, 50, every):
        record = copied(unsent.record, f"{kind}-{at}")
        monkeypatch.setattr("executor.tracking.mlflow_client.open_client", lambda *a, at=at: Failing(client, at, error))
        sender = Replay(store, record)
        with suppress(Killed):
            if sender.send() is None:
                break
            assert lacks(Record.load(record))
        monkeypatch.undo()
        send(unsent.toy, record)
        assert held(client, record) == expected
        assert not lacks(Record.load(record))
    assert 20 < at < 49
