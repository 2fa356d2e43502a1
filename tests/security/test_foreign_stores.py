"""A store that somebody else made is only looked at: what writes, sends or serves refuses it until it is trusted."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
from toy_ops import ONE_NODE, Toy

from dsl.errors import StoreError
from executor.results.op_hooks import Part, Request, shown_by_ops
from executor.tracking.mlflow_client import check_trusted

REFUSED = "not one that you made here, at this place; read it, then repeat the command with --trust"
ACTING = [
    *(["run", "pipeline.toml"], ["accept", "pipeline.toml", "a", "--yes"]),
    *([name] for name in ("resume", "sync", "ui", "serve", "diagnose")),
]
UNKNOWN = "not as you ran it here, or you never did"


@pytest.fixture
def clone(tmp_path):
    """A repository with a store in it, from somebody whose op file its user has run elsewhere."""
    (tmp_path / "own").mkdir()
    own = Toy(tmp_path / "own", ONE_NODE, tracked=True)
    assert own.dflow("run", str(own.file)).returncode == 0
    shutil.copytree(own.folder, tmp_path / "clone")
    return Toy(tmp_path / "clone", ONE_NODE, tracked=True, own=False)


def changed(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("command", ACTING, ids=" ".join)
def test_what_acts_refuses_a_store_of_somebody_else(command, clone):
    before = changed(clone.store)
    result = clone.dflow(*command)
    assert result.returncode == 2 and (REFUSED in result.stderr or UNKNOWN in result.stderr), result.stderr
    assert changed(clone.store) == before


def test_trust_is_given_once(clone):
    assert clone.dflow("run", "pipeline.toml", "--trust").returncode == 0
    assert clone.dflow("run", "pipeline.toml").returncode == 0
    assert clone.dflow("sync").returncode == 0


def test_no_file_of_an_mlflow_database_of_somebody_else_is_written(clone, tmp_path):
    """Its runs would say that their artifacts belong into a folder of the victim's."""
    (tmp_path / "private").mkdir()
    with sqlite3.connect(clone.store / "mlflow.db") as database:
        database.execute("update runs set artifact_uri = ?", ((tmp_path / "private").as_uri(),))
        database.execute("update experiments set artifact_location = ?", ((tmp_path / "private").as_uri(),))
    for command in (["sync", "--all"], ["run", "pipeline.toml", "-s", "a.text=other"]):
        assert clone.dflow(*command).returncode == 2
    assert list((tmp_path / "private").iterdir()) == []


def test_an_op_file_of_somebody_elses_record_is_not_imported_though_its_user_has_run_the_same(clone, tmp_path):
    """What it imports is decided by where it lies."""
    for command in (["status"], ["report", "-o", "page.html"]):
        (clone.folder / "stamp.py").write_text("")
        assert clone.dflow(*command).returncode == 0
    assert REFUSED in (clone.folder / "page.html").read_text()


def test_a_report_shows_nothing_of_an_artifact_with_links(tmp_path):
    (tmp_path / "artifact").mkdir()
    (tmp_path / "private").write_text("nobody else's")
    (tmp_path / "artifact" / "preview.html").symlink_to(tmp_path / "private")
    for others in ((), (Part(tmp_path, {}),)):
        hook, op = ("compare", "evaluate") if others else ("report", "tokenize_chat")
        request = Request(hook, op, (), (Part(tmp_path / "artifact", {}), *others))
        assert shown_by_ops([request])[request].failed.startswith("its artifact holds a link, preview.html")


@pytest.mark.parametrize("name", ["mlflow.db", "mlartifacts"])
def test_a_folder_with_links_does_not_become_a_store(name, tmp_path):
    toy = Toy(tmp_path, ONE_NODE, tracked=True)
    toy.store.mkdir()
    (toy.store / name).symlink_to(tmp_path / "private")
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 1 and "holds other files and is not a dflow store" in result.stderr
    assert not (tmp_path / "private").exists()


def test_a_tracking_server_that_only_the_state_of_a_record_names_gets_nothing(tmp_path):
    """With or without secrets in its address: MLflow sends what credentials it finds."""
    toy = Toy(tmp_path, ONE_NODE, tracked=True)
    assert toy.dflow("run", str(toy.file), "-s", "mlflow.tracking=false").returncode == 0
    [state] = toy.store.glob("records/*/events.jsonl")
    state.write_text(
        state.read_text().replace('"kind":"run",', '"kind":"run","tracking_uri":"http://127.0.0.1:9/theirs",')
    )
    for command in (["sync", state.parent.name], ["resume", "--from", "a"]):
        result = toy.dflow(*command)
        assert result.returncode == 2 and "the tracking server http://127.0.0.1:9" in result.stderr
    state.write_text(state.read_text().replace("http://127.0.0.1:9/theirs", "http://me:sesame@127.0.0.1:9/?key=sesame"))
    for command in (["sync", state.parent.name], ["resume", "--from", "a"]):
        result = toy.dflow(*command)
        assert result.returncode == 2 and "the tracking server http://***@127.0.0.1:9/?***" in result.stderr
        assert "sesame" not in result.stdout + result.stderr
    with pytest.raises(StoreError, match=r"the record sends to http://\*\*\*@127.0.0.1:9/\?\*\*\*, which"):
        check_trusted("http://me:sesame@127.0.0.1:9/?key=sesame", state.parent.name)
