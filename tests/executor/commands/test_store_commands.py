"""dflow gc, rm, runs --tag and doctor --verify as a user meets them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from imitated_runs import artifacts, begin, dflow, ended, run, toy_pipeline
from toy_ops import PROJECT

from dsl.errors import StoreError
from executor.cli import main
from executor.records.run_record import find_record
from executor.records.run_tags import add_tag
from executor.store.artifact_store import Store
from executor.system.file_locks import shared_gc_lock

CHANGING = [["gc", "--delete"], ["rm", "RUN", "--yes"], ["runs", "--tag", "best", "RUN"], ["pull", "SHARED", "RUN"]]
READING = [
    ["gc"],
    ["gc", "--usage"],
    ["doctor", "--verify"],
    ["doctor", "--verify", "--quick"],
    ["status"],
    ["push", "SHARED"],
]


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path)


def test_gc_shows_first_and_deletes_when_it_is_said(toy, capsys):
    run(toy, "a.text=x", contents="old")
    new = run(toy, contents="new")
    assert dflow(toy, "gc", "--keep", "1") == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0][:15] for line in out[:4]] == ["goes: artifact "] * 4
    assert "stays: 4 artifacts, " in out[4] and f"run {new.run}: one of the last 1 of toy" in out[4]
    assert out[5].endswith("would be freed; nothing was removed; to delete: dflow gc --delete --keep 1")
    assert len(artifacts(toy)) == 8
    assert dflow(toy, "gc", "--keep", "1", "--delete") == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("removed: artifact ")
    assert len(artifacts(toy)) == 4
    assert dflow(toy, "gc", "--keep", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to remove"


def test_gc_says_it_to_programs_too(toy, capsys):
    record = run(toy)
    assert dflow(toy, "gc", "--keep", "0", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in told["goes"]} == artifacts(toy)
    assert (told["deleted"], told["runs"], told["index_lines"], told["stays"]) == (False, {}, 4, [])
    assert told["freed_bytes"] == sum(row["bytes"] for row in told["goes"])
    dflow(toy, "gc", "--json")
    assert json.loads(capsys.readouterr().out)["runs"] == {record.run: "one of the last 10 of toy"}


def test_gc_waits_while_a_run_takes_artifacts_into_use(toy):
    run(toy)
    program = "import sys, executor.cli; sys.exit(executor.cli.main())"
    with shared_gc_lock(toy.store):
        waiting = subprocess.Popen(
            [sys.executable, "-c", program, "gc", "--delete", "--keep", "0", "--store", str(toy.store)],
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        assert waiting.stderr.readline() == "waiting: a run reads what the store holds\n"
        assert len(artifacts(toy)) == 4
    _, error = waiting.communicate(timeout=300)
    assert (waiting.returncode, error, artifacts(toy)) == (0, "", set())


def test_a_negative_number_of_runs_is_a_mistake(toy, capsys):
    with pytest.raises(SystemExit):
        dflow(toy, "gc", "--keep", "-1")
    assert 'argument --keep: expected a whole number, 0 or more, got "-1"' in capsys.readouterr().err


def test_rm_takes_a_run_away_and_leaves_its_artifacts(toy, capsys):
    old, new = run(toy), run(toy, "a.text=x")
    before = artifacts(toy)
    assert dflow(toy, "rm", old.run, "--yes") == 0
    assert [path.name for path in (toy.store / "records").iterdir()] == [new.run]
    assert artifacts(toy) == before
    assert list((toy.store / "work").iterdir()) == []
    assert "MLflow keeps its copy" in capsys.readouterr().out
    assert dflow(toy, "rm", old.run, "--yes") == 2
    assert "is no run of this store" in capsys.readouterr().err


def test_rm_asks_first(toy, capsys, monkeypatch):
    record = run(toy)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert dflow(toy, "rm", record.run) == 1
    assert f"no terminal to ask on; use `dflow rm {record.run} --yes`" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code in (("", 1), ("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert dflow(toy, "rm", record.run) == code


def test_rm_refuses_a_running_and_a_tagged_run(toy, capsys):
    session = begin(toy)
    assert dflow(toy, "rm", session.record.run, "--yes") == 1
    assert "is still running; wait for it, or stop it first" in capsys.readouterr().err
    ended(session.record, "stopped")
    dflow(toy, "runs", "--tag", "best", session.record.run)
    assert dflow(toy, "rm", "best", "--yes") == 1
    assert "is tagged best; to remove it, first remove the tag: dflow runs --untag best" in capsys.readouterr().err
    assert find_record(toy.store / "records", "best").run == session.record.run


def test_rm_removes_a_record_that_cannot_be_read(toy):
    record = run(toy)
    (record.folder / "events.jsonl").write_text("")
    assert dflow(toy, "rm", record.run, "--yes") == 0
    assert list((toy.store / "records").iterdir()) == []


def test_a_tag_stands_for_its_run_everywhere(toy, capsys):
    first, second = run(toy), run(toy, "a.text=x")
    assert dflow(toy, "runs", "--tag", "bestes-Modell_ü.1", first.run) == 0
    capsys.readouterr()
    assert dflow(toy, "status", "bestes-Modell_ü.1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"] == first.run
    assert dflow(toy, "runs", "--tag", "bestes-Modell_ü.1", second.run) == 1
    assert f'run {first.run} has the tag "bestes-Modell_ü.1"; remove it first' in capsys.readouterr().err
    assert dflow(toy, "runs", "--untag", "bestes-Modell_ü.1") == 0
    assert dflow(toy, "runs", "--tag", "bestes-Modell_ü.1", second.run) == 0
    assert find_record(toy.store / "records", "bestes-Modell_ü.1").run == second.run
    assert dflow(toy, "runs", "--untag", first.run) == 2
    assert f'run {first.run} has no tag "{first.run}"; its tags: none' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["2026", "", "a b", "a/b", "-x", "../x"])
def test_a_tag_is_never_taken_for_a_run_or_a_path(toy, capsys, name):
    folder = run(toy).folder
    with pytest.raises(StoreError, match="cannot be a tag"):
        add_tag(folder, name)
    if not name.startswith("-"):
        assert dflow(toy, "runs", "--tag", name, folder.name) == 1
        assert "cannot be a tag" in capsys.readouterr().err


def test_du_counts_every_artifact_once(toy, capsys):
    shared = run(toy, contents="same")
    other = run(toy, "c.between=x", name="other", contents="changed")
    assert dflow(toy, "gc", "--usage", "--json") == 0
    use = json.loads(capsys.readouterr().out)
    sizes = {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in (toy.store / "objects").iterdir()
    }
    assert use["artifacts"] == sum(sizes.values())
    assert use["total"] == sum(file.stat().st_size for file in toy.store.rglob("*") if file.is_file())
    in_both = {shared.state.nodes[node].digest for node in "ab"} & {other.state.nodes[node].digest for node in "ab"}
    assert use["shared"] == sum(sizes[digest] for digest in in_both) > 0
    assert (use["unused"], use["freed_by_gc"]) == (0, 0)
    assert [pipeline["pipeline"] for pipeline in use["pipelines"]] == ["other", "toy"]
    (told,) = use["pipelines"][1]["runs"]
    assert (told["run"], told["bytes"]) == (shared.run, sum(sizes[node.digest] for node in shared.state.nodes.values()))
    assert told["only"] == told["bytes"] - use["shared"]
    assert {node["node"]: node["bytes"] for node in told["nodes"]} == {
        node_id: sizes[node.digest] for node_id, node in shared.state.nodes.items()
    }
    assert dflow(toy, "gc", "--usage") == 0
    assert f"{use['total']:,} bytes" in capsys.readouterr().out.splitlines()[0]


def arguments_of(command, toy, record):
    names = {"RUN": record.run, "SHARED": str(toy.folder / "shared")}
    return [names.get(word, word) for word in command]


@pytest.mark.parametrize("command", [*CHANGING, *READING], ids=" ".join)
def test_a_store_that_is_a_file_is_one_clear_line(toy, capsys, command):
    toy.store.write_text("")
    words = [{"RUN": "20260101"}.get(word, word) for word in command]
    assert dflow(toy, *words) == 1
    error = capsys.readouterr().err
    assert (len(error.splitlines()), "is not a folder" in error) == (1, True)


@pytest.fixture
def read_only(toy):
    """A store on a file system that is mounted for reading only, with a run, pushed to SHARED."""
    record = run(toy)
    assert dflow(toy, "push", str(toy.folder / "shared")) == 0
    mounted = subprocess.run(["mount", "--bind", str(toy.store), str(toy.store)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(toy.store)], check=True)
    yield record
    subprocess.run(["umount", str(toy.store)], check=True)


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_what_only_reads_works_on_a_read_only_store(toy, read_only, command):
    assert dflow(toy, *arguments_of(command, toy, read_only)) == 0


@pytest.mark.parametrize("command", CHANGING, ids=" ".join)
def test_what_changes_a_read_only_store_says_so_in_one_line(toy, read_only, capsys, command):
    assert dflow(toy, *arguments_of(command, toy, read_only)) == 1
    error = capsys.readouterr().err
    assert (len(error.splitlines()), "read-only" in error.lower()) == (1, True)


OTHER_USER = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("command", [*CHANGING, *READING], ids=" ".join)
def test_a_store_of_another_user_is_read_and_not_changed(tmp_path, command):
    """Run by a user who may read it: nobody."""
    toy = toy_pipeline(tmp_path)
    record = run(toy)
    assert dflow(toy, "push", str(toy.folder / "shared")) == 0
    for path in (toy.store, tmp_path, *tmp_path.parents):
        if "pytest-" in str(path):
            path.chmod(0o755)
    words = arguments_of(command, toy, record)
    program = (  # what nobody may not read is imported before
        "import importlib, os, sys, executor.cli, executor.store.integrity, fsspec.implementations.local\n"
        "executor.store.integrity.is_settled = lambda stamp, now: True\n"  # as of older files: they would be noted
        "importlib.import_module(f'executor.commands.{sys.argv[1]}')\n"
        f"os.setgid({OTHER_USER}); os.setuid({OTHER_USER}); sys.exit(executor.cli.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *words, "--store", str(toy.store)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), "HOME": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    if command in READING and command[0] != "push":  # which sends what is in the store
        assert (result.returncode, result.stderr) == (0, "")
    else:
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
        assert "is not one that you made here" in result.stderr


def test_a_store_that_is_not_there_is_not_made_by_looking(toy, capsys):
    assert dflow(toy, "gc", "--usage") == 0
    assert dflow(toy, "gc") == 0
    assert dflow(toy, "rm", "x", "--yes") == 2
    assert dflow(toy, "runs", "--tag", "best", "x") == 2
    assert not toy.store.exists()
    assert Store.open(toy.store, write=False).newest("k") is None


def test_a_store_that_can_be_nowhere_is_said_in_one_line(toy, capsys):
    assert 1 == main(["run", str(toy.file), "--store", "/proc/dflow"])
    assert "dflow: /proc/dflow: the folder cannot be created; choose another --store\n" == capsys.readouterr().err
