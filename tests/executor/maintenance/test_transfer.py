"""Artifacts go to what a team shares and come back byte for byte, whatever happens on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest
from imitated_runs import artifacts, dflow, edit, planned, run, run_again, toy_pipeline
from toy_ops import PROJECT, Toy

from dsl.errors import StoreError
from executor.maintenance.gc import collect
from executor.maintenance.push_pull import newest, pull, push, recorded
from executor.maintenance.remote import Remote
from executor.records.run_record import find_record
from executor.store.artifact_store import FORMAT, Store


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path / "mine")


@pytest.fixture
def shared(tmp_path):
    return tmp_path / "what we share, ü"


def other_store(toy):
    """A colleague's: the same pipeline and ops, another store."""
    other = Toy(toy.folder)
    other.store = toy.folder / "other"
    return other


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def no_progress(size):
    return


def test_what_is_pushed_looks_like_a_store(toy, shared):
    record = run(toy)
    assert dflow(toy, "push", str(shared)) == 0
    assert sorted(path.name for path in shared.iterdir()) == ["format", "index", "objects"]
    assert files(shared / "objects") == files(toy.store / "objects")
    node = record.state.nodes["b"]
    line = json.loads((shared / "index" / node.key / node.digest).read_text())
    assert line == json.loads((toy.store / "index" / node.key).read_text())


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_run_elsewhere_finds_everything_pulled(toy, shared, scheme):
    record = run(toy)
    url = f"{scheme}{shared}"
    assert dflow(toy, "push", url) == 0
    other = other_store(toy)
    assert dflow(other, "pull", url, str(toy.file)) == 0
    assert files(other.store / "objects") == files(toy.store / "objects")
    assert {decision.cache for decision in planned(other, record).values()} == {"hit"}
    line = Store.open(other.store, write=False).index(record.state.nodes["a"].key)[-1]
    assert (line.acceptance, line.source, line.run) == ("pulled", url, record.run)
    assert list((other.store / "work").iterdir()) == []
    if scheme == "memory://":
        fsspec.filesystem("memory").rm("/", recursive=True)


def test_dflow_run_after_a_pull_runs_nothing(tmp_path, shared):
    """With real runs, in folders whose names have spaces."""
    (tmp_path / "my folder").mkdir()
    toy = Toy(tmp_path / "my folder")
    assert toy.dflow("run", str(toy.file)).returncode == 0
    result = toy.dflow("push", str(shared))
    assert result.returncode == 0, result.stderr
    other = other_store(toy)
    result = other.dflow("pull", str(shared), str(toy.file))
    assert (result.returncode, result.stdout.splitlines()) == (
        0, ["a: pulled", "b: pulled", "c: pulled", "d: pulled", f"4 artifacts pulled from {shared}"]
    ), result.stderr  # fmt: skip
    toy.calls()
    result = other.dflow("run", str(toy.file))
    assert (result.returncode, toy.calls()) == (0, []), result.stderr
    assert {cache for _, cache in other.caches().values()} == {"hit"}


def test_a_store_without_runs_takes_all_that_the_remote_has(toy, shared, capsys):
    record = run(toy)
    dflow(toy, "push", str(shared))
    other = other_store(toy)
    capsys.readouterr()
    assert dflow(other, "pull", str(shared), "--node", "c") == 0
    assert capsys.readouterr().out.splitlines() == ["c: pulled", f"1 artifact pulled from {shared}"]
    assert dflow(other, "pull", str(shared), "--node", "x") == 2
    assert 'there is no node "x" (nodes: ' in capsys.readouterr().err
    assert dflow(other, "pull", str(shared)) == 0
    assert sorted(capsys.readouterr().out.splitlines()[:-1]) == [
        "a: pulled", "b: pulled", "c: already in the store", "d: pulled"
    ]  # fmt: skip
    assert files(other.store / "objects") == files(toy.store / "objects")
    assert {decision.cache for decision in planned(other, record).values()} == {"hit"}


def test_all_that_a_remote_has_is_not_fetched_onto_a_disk_that_is_too_small(toy, shared, capsys, monkeypatch):
    run(toy)
    dflow(toy, "push", str(shared))
    monkeypatch.setattr("executor.commands.pull.free_bytes", lambda path: 10)
    other = other_store(toy)
    capsys.readouterr()
    assert dflow(other, "pull", str(shared)) == 1
    assert f"{shared} holds 4 artifacts of " in (error := capsys.readouterr().err)
    assert f"10 bytes are free at {other.store}; fetch those of a pipeline: dflow pull {shared} FILE" in error
    assert artifacts(other) == set()


def test_one_node_can_be_fetched_without_what_is_above_it(toy, shared):
    record = run(toy)
    dflow(toy, "push", str(shared))
    other = other_store(toy)
    assert dflow(other, "pull", str(shared), str(toy.file), "--node", "c") == 0
    assert artifacts(other) == {record.state.nodes["c"].digest}


def test_one_node_can_be_pushed_alone(toy, shared, capsys):
    record = run(toy)
    assert dflow(toy, "push", str(shared), record.run, "--node", "a") == 0
    assert [path.name for path in (shared / "objects").iterdir()] == [record.state.nodes["a"].digest]
    other = other_store(toy)
    capsys.readouterr()
    assert dflow(other, "pull", str(shared), str(toy.file)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a: pulled",
        *(f"{node}: neither in the store nor at the remote" for node in "bcd"),
        f"1 artifact pulled from {shared}",
        "3 of 4 nodes are neither in the store nor at the remote: they will run",
    ]
    assert dflow(other, "pull", str(shared), str(toy.file), "--node", "d") == 1
    assert dflow(other, "pull", str(shared), str(toy.file), "--node", "dd") == 2
    assert dflow(toy, "push", str(shared), "--node", "dd") == 2


def test_a_run_gets_back_what_was_lost_here(toy, shared):
    record = run(toy)
    before = files(toy.store / "objects")
    dflow(toy, "push", str(shared))
    shutil.rmtree(toy.store / "objects" / record.state.nodes["c"].digest)
    assert dflow(toy, "pull", str(shared), record.run) == 0
    assert files(toy.store / "objects") == before


def test_what_is_there_already_is_not_sent_again(toy, shared, capsys):
    run(toy)
    dflow(toy, "push", str(shared))
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert dflow(toy, "push", str(shared)) == 0
    assert capsys.readouterr().out.splitlines()[0] == "a: already there"
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*") if path.is_file()} == before


def test_the_newest_of_several_results_is_the_one_that_counts(toy, shared):
    first = run(toy, contents="first")
    second = run_again(toy, first, "d", contents="second")
    for record in (second, first):
        assert dflow(toy, "push", str(shared), record.run) == 0
    found = newest(Remote(str(shared)), first.state.nodes["d"].key)
    assert found.digest == second.state.nodes["d"].digest


def test_a_damaged_artifact_is_not_sent(toy, shared, capsys):
    record = run(toy)
    digest = record.state.nodes["b"].digest
    edit(toy.store / "objects" / digest / "sub" / "text.txt", "x")
    assert dflow(toy, "push", str(shared)) == 1
    assert f'the artifact of node "b" is damaged, so it is not sent: {digest[:12]}: sub/text.txt' in (
        capsys.readouterr().err
    )
    assert not (shared / "objects" / digest).exists()


@pytest.mark.parametrize("name", ["sub/text.txt", "manifest.json"])
def test_an_artifact_that_was_damaged_there_is_refused_and_comes_when_it_is_repaired(toy, shared, capsys, name):
    record = run(toy)
    dflow(toy, "push", str(shared))
    digest = record.state.nodes["b"].digest
    path = shared / "objects" / digest / name
    text = path.read_text()
    edit(path, text.replace("b", "x"))
    other = other_store(toy)
    assert dflow(other, "pull", str(shared), str(toy.file)) == 1
    assert re.search(rf'node "b" is damaged there: {name} .*; remove objects/{digest} there', capsys.readouterr().err)
    assert artifacts(other) == {record.state.nodes["a"].digest}
    edit(path, text)
    assert dflow(other, "pull", str(shared), str(toy.file)) == 0
    assert files(other.store / "objects") == files(toy.store / "objects")


def test_a_file_that_is_larger_there_than_its_entry_says_is_not_fetched(toy, shared, capsys, monkeypatch):
    first = run(toy)
    dflow(toy, "push", str(shared))
    digest = first.state.nodes["b"].digest
    edit(shared / "objects" / digest / "sub" / "text.txt", "b" * 100_000)
    fetched, get = [], Remote.get
    monkeypatch.setattr(Remote, "get", lambda self, name, *rest: (fetched.append(name), get(self, name, *rest)))
    assert dflow(other_store(toy), "pull", str(shared), str(toy.file)) == 1
    assert "is damaged there: sub/text.txt has 100000 bytes instead of " in capsys.readouterr().err
    assert fetched and not any(digest in name for name in fetched)


def test_names_that_lead_out_of_the_artifact_are_refused(toy, shared, monkeypatch):
    record = run(toy)
    dflow(toy, "push", str(shared))
    digest = record.state.nodes["a"].digest
    path = shared / "objects" / digest / "manifest.json"
    edit(path, path.read_text().replace("sub/text.txt", "../text.txt"))
    monkeypatch.setattr("executor.maintenance.push_pull.artifact_digest", lambda files: digest)
    store = Store.open(other_store(toy).store, write=True)
    (wanted,) = recorded(Store.open(toy.store, write=False), record, "a")
    with pytest.raises(StoreError, match=r"the file name '\.\./text\.txt' points outside the artifact"):
        pull(store, Remote(str(shared)), wanted, no_progress, print)


@pytest.mark.parametrize("place", ["pull:file", "pull:fetched", "pull:sealed", "commit:renamed", "commit:indexed"])
def test_a_pull_that_was_killed_goes_on(toy, shared, place):
    record = run(toy)
    dflow(toy, "push", str(shared))
    other = other_store(toy)
    arguments = ["pull", str(shared), str(toy.file), "--store", str(other.store)]
    killed = killed_at(place, arguments)
    assert killed.returncode == -9, killed.stderr
    here = artifacts(other)
    assert dflow(other, "pull", str(shared), str(toy.file)) == 0
    assert here <= artifacts(other)
    assert files(other.store / "objects") == files(toy.store / "objects")
    assert {decision.cache for decision in planned(other, record).values()} == {"hit"}
    collect(Store.open(other.store, write=True), keep=0)
    assert list((other.store / "work").iterdir()) == []


@pytest.mark.parametrize("place", ["push:file", "push:manifest"])
def test_a_push_that_was_killed_goes_on(toy, shared, place):
    record = run(toy)
    killed = killed_at(place, ["push", str(shared), "--store", str(toy.store)])
    assert killed.returncode == -9, killed.stderr
    if place == "push:file":
        assert newest(Remote(str(shared)), record.state.nodes["a"].key) is None
    assert dflow(toy, "push", str(shared)) == 0
    assert files(shared / "objects") == files(toy.store / "objects")


def killed_at(place, arguments):
    program = "import sys, executor.cli; sys.exit(executor.cli.main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(PROJECT), "DFLOW_FAIL_AT": place},
        capture_output=True,
        check=False,
    )


def test_two_at_once_are_in_nobodys_way(toy, shared):
    record = run(toy)
    wanted = recorded(Store.open(toy.store, write=False), record, None)
    Remote(str(shared)).check_format(write=True)
    failed = []

    def side_by_side(move):
        def all_of_it():
            try:
                for each in wanted:
                    move(each)
            except StoreError as error:
                failed.append(error)

        threads = [threading.Thread(target=all_of_it) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    side_by_side(lambda each: push(Store.open(toy.store, write=False), Remote(str(shared)), each, no_progress))
    other = other_store(toy)
    Store.open(other.store, write=True)
    side_by_side(lambda each: pull(Store(other.store), Remote(str(shared)), each, no_progress, print))
    assert failed == []
    assert files(other.store / "objects") == files(toy.store / "objects") == files(shared / "objects")


def test_another_store_can_be_read_but_not_pushed_to(toy, capsys):
    record = run(toy)
    other = other_store(toy)
    assert dflow(other, "pull", str(toy.store), str(toy.file)) == 0
    assert artifacts(other) == artifacts(toy)
    assert dflow(toy, "push", str(other.store), record.run) == 1
    assert "is a store of runs; push to a directory of its own" in capsys.readouterr().err


def test_a_remote_that_cannot_be_used_is_one_clear_line(toy, tmp_path, capsys):
    run(toy)
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "cat.png").write_text("")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "format").write_text("7\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "format").write_text("cat\n")
    said = {
        ("pull", str(tmp_path / "nothing")): "nothing was pushed there; check the URL, or start with `dflow push`",
        ("push", str(tmp_path / "file" / "below")): "cannot be reached or used: Not a directory",
        ("push", str(tmp_path / "full")): "holds other files; push to a directory of its own",
        ("pull", str(tmp_path / "newer")): f"has layout 7, this version of dflow uses layout {FORMAT}; use another URL",
        ("pull", str(tmp_path / "broken")): "cannot be reached or used",
        ("push", "nosuch://bucket"): "cannot be reached or used: Protocol not known: nosuch",
        ("pull", "http://user:secret@127.0.0.1:1/captures"): "http://127.0.0.1:1/captures: ",
    }
    for (command, url), expected in said.items():
        assert dflow(toy, command, url) == 1
        error = capsys.readouterr().err
        assert expected in error
        assert (len(error.splitlines()), "secret" in error) == (1, False)


def test_a_pull_that_finds_nothing_at_all_fails(toy, shared, capsys):
    run(toy)
    dflow(toy, "push", str(shared))
    other = other_store(toy)
    assert dflow(other, "pull", str(shared), str(toy.file), "-s", "a.text=other") == 1
    assert "4 of 4 nodes are neither in the store nor at the remote: they will run" in capsys.readouterr().out


def test_tokens_in_a_url_are_neither_shown_nor_kept(toy, shared, capsys):
    run(toy)
    assert Remote("memory://user:secret@host/a?token=secret#secret").url == "memory://host/a"
    assert Remote(f"file://{shared}").url == f"file://{shared}"
    assert dflow(toy, "pull", "http://127.0.0.1:1/captures?token=secret") == 1
    assert "secret" not in capsys.readouterr().err


def test_what_was_accepted_is_shared_as_that(toy, shared, capsys):
    run(toy)
    other = other_store(toy)
    ops = toy.folder / "toy.py"
    ops.write_text(ops.read_text().replace(".upper())", ".upper() + '')"))
    assert dflow(toy, "accept", str(toy.file), "--reason", "harmless", "--yes") == 0
    assert dflow(toy, "push", str(shared)) == 0
    assert "b: its acceptance was sent too" in capsys.readouterr().out
    assert dflow(other, "pull", str(shared), str(toy.file)) == 0
    capsys.readouterr()
    assert dflow(other, "plan", str(toy.file), "--why", "b") == 0
    told = capsys.readouterr().out
    assert f"pulled from {shared}" in told
    assert re.search(r"accepted by .*: harmless; computed for key", told)


WRONG_LINES = [
    ({"time": "abc"}, 'time: expected float, got "abc"'),
    ({"time": None}, "time: expected float, got none"),
    ({"time": float("inf")}, "time: expected seconds, got inf"),
    ({"digest": 5}, "digest: expected str, got 5 (int)"),
    ({"digest": "../x"}, 'digest: "../x" does not match'),
    ({"run": "../../x"}, 'run: "../../x" does not match'),
    ({"neutral": [1]}, "neutral: expected table, got [1] (list)"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG_LINES, ids=str)
def test_an_index_line_that_is_none_is_refused(toy, shared, capsys, wrong, said):
    record = run(toy)
    dflow(toy, "push", str(shared))
    node = record.state.nodes["a"]
    path = shared / "index" / node.key / node.digest
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}) + "\n")
    refused(toy, shared, capsys, said)


HASH = "0" * 64
ENTRY = {"size": 1, "sha256": HASH}
WRONG_MANIFESTS = [
    ({"files": {}}, "files: must not be empty"),
    ({"files": {"": ENTRY}}, "the file name ''"),
    ({"files": {".": ENTRY}}, "the file name '.'"),
    ({"files": {"/tmp/x": ENTRY}}, "the file name '/tmp/x'"),
    ({"files": {"a\0b": ENTRY}}, "the file name 'a"),
    ({"files": {"\udc80": ENTRY}}, "is not valid UTF-8"),
    ({"files": {"a": ENTRY, "a/b": ENTRY}}, "a is both a file and a folder"),
    ({"files": {"a": {"size": "1", "sha256": HASH}}}, 'files.a.size: expected int, got "1"'),
    ({"files": {"a": {"size": -1, "sha256": HASH}}}, "a: size: expected 0 or more, got -1"),
    ({"files": {"a": {**ENTRY, "mode": 7}}}, "files.a.mode: unknown key"),
    ({"files": {"a": {"size": 1, "sha256": "0"}}}, 'a: sha256: "0" does not match'),
    ({"files": {"a": 1}}, "files.a: expected table, got 1 (int)"),
    ({"metrics": [1]}, "metrics: expected table of float, got [1] (list)"),
    ({"metrics": {"loss": "low"}}, 'metrics.loss: expected float, got "low"'),
    ({"op": "other"}, 'its op is "other", but the node uses "make"'),
    ({"op": {}}, "op: expected str, got {} (table)"),
    ({"key": "x"}, 'key: "x" does not match'),
    ({"key_parts": 5}, "key_parts: expected table, got 5 (int)"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG_MANIFESTS, ids=str)
def test_a_manifest_that_is_none_is_refused(toy, shared, capsys, wrong, said):
    record = run(toy)
    dflow(toy, "push", str(shared))
    path = shared / "objects" / record.state.nodes["a"].digest / "manifest.json"
    edit(path, json.dumps({**json.loads(path.read_text()), **wrong}))
    refused(toy, shared, capsys, said)


def refused(toy, shared, capsys, said):
    """Assert that a command is refused in one line that names the remote, and that nothing is placed."""
    other = other_store(toy)
    capsys.readouterr()
    assert dflow(other, "pull", str(shared), str(toy.file)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(shared) in line
    assert said in line
    assert list((other.store / "objects").iterdir()) == list((other.store / "index").iterdir()) == []


def test_reading_is_enough_to_push_from_a_store(toy, shared):
    run(toy)
    find_record(toy.store / "records", None)
    before = files(toy.store)
    dflow(toy, "push", str(shared))
    assert files(toy.store) == before


def test_a_push_from_a_store_of_another_dflow_is_refused(toy, shared, capsys):
    run(toy)
    Path(toy.store / "format").write_text("7\n")
    assert dflow(toy, "push", str(shared)) == 1
    assert "the store has layout 7" in capsys.readouterr().err
    assert not shared.exists()
