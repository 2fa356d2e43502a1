"""A store that came from somebody else: what looking at it, and sending it to MLflow, takes from this machine."""

from __future__ import annotations

import base64
import json
import time

import pytest
from toy_ops import ONE_NODE, Toy

from dsl.files import append_line
from executor.records.events import Event, Figure
from executor.records.run_record import Record

PRIVATE = b"nobody else's"


@pytest.fixture
def received(tmp_path):
    """A run that is not in MLflow yet, and a private file beside the store that its record names in every way."""
    (tmp_path / "shared").mkdir()
    toy = Toy(tmp_path / "shared", ONE_NODE, tracked=True)
    assert toy.dflow("run", str(toy.file), "-s", "mlflow.tracking=false").returncode == 0
    private = tmp_path / "private.png"
    private.write_bytes(PRIVATE)
    record = Record.load(next(toy.store.glob("records/*")))
    figures = record.folder / "figures" / "a"
    figures.mkdir(parents=True)
    (figures / "own.png").write_bytes(b"a curve")
    for name in ("own", "none", "../../../../../../private", str(private.with_suffix(""))):
        append_line(record.events_path, Event(time.time(), "a", 1, Figure(name, str(private))).to_json())
    return toy


def test_sync_sends_no_file_from_outside_the_store(received):
    [record] = received.store.glob("records/*")
    result = received.dflow("sync", record.name)
    assert result.returncode == 0, result.stderr
    sent = [path for path in received.store.glob("mlartifacts/**/*") if path.is_file()]
    assert "own.png" in {path.name for path in sent}
    assert [path for path in sent if PRIVATE in path.read_bytes()] == []


def test_a_record_with_a_link_is_not_sent(received, tmp_path):
    [record] = received.store.glob("records/*")
    (record / "figures" / "a" / "linked.png").symlink_to(tmp_path / "private.png")
    result = received.dflow("sync", record.name)
    assert result.returncode == 1
    assert "linked.png is a symbolic link" in result.stderr


def test_a_report_shows_no_file_from_outside_the_store(received, tmp_path):
    [record] = received.store.glob("records/*")
    (record / "figures" / "a" / "linked.png").symlink_to(tmp_path / "private.png")
    (record / "a.log").unlink()
    (record / "a.log").symlink_to(tmp_path / "private.png")
    page = tmp_path / "report.html"
    assert received.dflow("report", "-o", str(page)).returncode == 0
    text = page.read_text()
    assert base64.b64encode(b"a curve").decode() in text
    assert base64.b64encode(PRIVATE).decode() not in text and PRIVATE.decode() not in text


def test_a_pushed_artifact_does_not_say_where_its_sources_lay(tmp_path):
    (tmp_path / "of a person").mkdir()
    pipeline = ONE_NODE.replace('text = "hello"', 'source = "private.txt"')
    toy = Toy(tmp_path / "of a person", pipeline)
    (toy.folder / "private.txt").write_text("a text")
    assert toy.dflow("run", str(toy.file)).returncode == 0
    [own] = toy.store.glob("objects/*/manifest.json")
    assert str(toy.folder / "private.txt") == json.loads(own.read_text())["config"]["source"]
    remote = tmp_path / "remote"
    pushed = toy.dflow("push", str(remote))
    assert pushed.returncode == 0, pushed.stderr
    [sent] = remote.glob("objects/*/manifest.json")
    assert "of a person" not in sent.read_text()
    assert "private.txt" == json.loads(sent.read_text())["config"]["source"]
    other = Toy(toy.folder, pipeline)
    other.store = tmp_path / "other"
    assert other.dflow("pull", str(remote), str(other.file)).returncode == 0
    assert "a text" == next(other.store.glob("objects/*/text.txt")).read_text()
