"""A store that somebody else made is only looked at: what writes, sends or serves refuses it until it is trusted."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
from toy_ops import ONE_NODE, Toy

from executor.results.op_hooks import Part, Request, shown_by_ops

REFUSED = "not one that you made here, at this place; read it, then repeat the command with --trust"
ACTING = [
    *(["run", "pipeline.toml"], ["accept", "pipeline.toml", "a", "--yes"]),
    *([name] for name in ("resume", "sync", "ui", "serve", "diagnose", "report")),
    *(
        ["push", "../remote"],
        ["pull", "../remote"],
        ["gc", "--delete"],
        ["rm", "2", "--yes"],
        ["runs", "--tag", "kept", "2"],
    ),
]
LOOKING = (
    "status",
    "runs",
    "diff",
    "logs a",
    "doctor --verify",
    "doctor --verify --full",
    "gc --usage",
    "gc",
    "report -o ../page.html",
)


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
    assert result.returncode == 2 and REFUSED in result.stderr, result.stderr
    assert changed(clone.store) == before


@pytest.mark.parametrize("is_damaged", [False, True])
def test_looking_writes_nothing_into_a_store_of_somebody_else(is_damaged, clone):
    if is_damaged:
        file = next(clone.store.glob("objects/*/text.txt"))
        file.chmod(0o644)
        file.write_text("HELLO")
    before = changed(clone.store)
    for command in LOOKING:
        result = clone.dflow(*command.split())
        assert result.returncode in (0, 1) and "Traceback" not in result.stderr, result.stderr
        assert changed(clone.store) == before, command


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
