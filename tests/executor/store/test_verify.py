"""Artifacts that were damaged after their commit are found, told, and never used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from imitated_runs import artifacts, edit, run, toy_pipeline
from toy_ops import Toy

from dsl.artifact_digest import MANIFEST
from dsl.errors import StoreError
from executor.cli import main
from executor.store import integrity
from executor.store.artifact_store import Store
from executor.store.integrity import VERIFIED, artifact_digests, check, set_aside


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path)


@pytest.fixture
def damaged(toy):
    """A store, a digest in it, and the file of it that a test damages."""
    record = run(toy)
    store = Store.open(toy.store, write=True)
    digest = record.state.nodes["b"].digest
    return store, digest, store.object_path(digest) / "sub" / "text.txt"


def test_what_was_committed_is_found_whole(toy):
    run(toy)
    store = Store.open(toy.store, write=False)
    assert check(store, artifact_digests(store)) == {}
    assert len(artifact_digests(store)) == 4


def kinds(found):
    return {digest: [(damage.where.part, damage.code) for damage in damages] for digest, damages in found.items()}


def test_a_missing_a_shortened_and_an_altered_file_are_told_apart(damaged):
    store, digest, path = damaged
    text = path.read_text()
    edit(path, "x" * len(text))
    assert check(store, [digest], sizes_only=True) == {}
    assert kinds(check(store, [digest])) == {digest: [("sub/text.txt", "content")]}
    edit(path, text[:-1])
    assert kinds(check(store, [digest], sizes_only=True)) == {digest: [("sub/text.txt", "size")]}
    path.unlink()
    assert kinds(check(store, [digest], sizes_only=True)) == {digest: [("sub/text.txt", "missing")]}


def test_a_file_that_somebody_added_is_told_unless_it_is_hidden(damaged):
    store, digest, path = damaged
    (path.parent / ".nfs0001").write_text("")
    assert check(store, [digest]) == {}
    (path.parent / "more.txt").write_text("")
    assert kinds(check(store, [digest])) == {digest: [("sub/more.txt", "extra")]}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": 1}', '{"files": {"a": 1}}', '{"files": {}}'])
def test_a_manifest_that_is_not_that_of_the_digest_is_damage(damaged, text):
    store, digest, path = damaged
    edit(path.parent.parent / MANIFEST, text)
    assert kinds(check(store, [digest], sizes_only=True)) == {digest: [(MANIFEST, "content")]}


def test_an_artifact_without_manifest_is_damaged(damaged):
    store, digest, path = damaged
    (path.parent.parent / MANIFEST).unlink()
    assert kinds(check(store, [digest])) == {digest: [(MANIFEST, "missing")]}


def test_a_file_that_was_read_and_is_untouched_is_not_read_again(damaged, monkeypatch):
    store, digest, _ = damaged
    monkeypatch.setattr(integrity, "is_settled", lambda stamp, now: True)
    assert check(store, [digest]) == {}
    read = []
    monkeypatch.setattr(integrity, "sha256_of", lambda file, advance: read.append(Path(file.name).name))
    assert (check(store, [digest]), read) == ({}, [])
    check(store, [digest], read_all=True)
    assert read == ["text.txt"]


def test_an_edit_of_the_same_size_is_found_though_its_times_were_put_back(damaged, monkeypatch):
    store, digest, path = damaged
    monkeypatch.setattr(integrity, "is_settled", lambda stamp, now: True)
    check(store, [digest])
    status = path.stat()
    time.sleep(0.05)  # more than the grain of the kernel's clock
    edit(path, "x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert kinds(check(store, [digest])) == {digest: [("sub/text.txt", "content")]}


def test_what_may_change_unseen_is_not_remembered(damaged, monkeypatch):
    store, digest, _ = damaged
    monkeypatch.setattr(integrity, "is_settled", lambda stamp, now: False)
    assert check(store, [digest]) == {}
    assert not (store.memos / VERIFIED).exists()


def test_a_broken_memo_costs_time_only(damaged, monkeypatch):
    store, digest, _path = damaged
    monkeypatch.setattr(integrity, "is_settled", lambda stamp, now: True)
    (store.memos / VERIFIED).write_text('{"digest": 1}\nxx\n[]\n{"digest":"d","name":"n","size":"1"}\n')
    assert check(store, [digest]) == {}
    assert len((store.memos / VERIFIED).read_text().splitlines()) == 5


def test_a_damaged_artifact_is_set_aside_and_no_longer_there(damaged):
    store, digest, _path = damaged
    assert store.has(digest)
    set_aside(store, [digest, digest])
    assert not store.has(digest)
    assert (store.path / "objects" / f"{digest}.damaged" / "sub" / "text.txt").exists()
    set_aside(store, [digest])  # it is aside already


def test_a_store_that_may_only_be_read_is_checked_all_the_same(damaged, monkeypatch, capsys):
    store, digest, path = damaged
    edit(path, "x" * len(path.read_text()))
    monkeypatch.setattr(integrity, "is_settled", lambda stamp, now: True)

    def refused(*arguments, **named):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(integrity, "append_lines", refused)
    monkeypatch.setattr(Path, "rename", refused)
    assert kinds(check(store, [digest])) == {digest: [("sub/text.txt", "content")]}
    with pytest.raises(StoreError, match=r"cannot be set aside \(Read-only file system\); runs would still use it"):
        set_aside(store, [digest])
    assert main(["doctor", "--verify", "--store", str(store.path)]) == 1
    assert "runs would still use it" in capsys.readouterr().err


def test_verify_names_what_is_damaged_and_what_makes_it_again(toy, capsys, monkeypatch):
    monkeypatch.chdir(toy.folder)
    record = run(toy)
    store = Store.open(toy.store, write=True)
    assert main(["doctor", "--verify", "--store", str(toy.store)]) == 0
    assert capsys.readouterr().out == "4 artifacts are unchanged (by content)\n"
    digest = record.state.nodes["b"].digest
    edit(store.object_path(digest) / "sub" / "text.txt", "x")
    assert main(["doctor", "--quick", "--verify", record.run, "--store", str(toy.store)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{digest[:12]}: sub/text.txt has another size",
        f'{digest[:12]}: node "b" of toy; rebuild it with `dflow resume {record.run}`',
        "1 of 4 artifacts is damaged (by name and size)",
    ]
    assert main(["doctor", "--verify", "--store", str(toy.store)]) == 0
    assert f"{digest}.damaged" in artifacts(toy)


def test_a_store_that_is_a_file_or_is_not_there(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--verify", "--store", str(tmp_path / "file")]) == 1
    assert "is not a folder" in capsys.readouterr().err
    assert main(["doctor", "--verify", "--store", str(tmp_path / "nothing")]) == 0
    assert not (tmp_path / "nothing").exists()


def altered(toy, node, text):
    """Edit what a node of the latest run wrote, its size kept."""
    digest = toy.state()["nodes"][node]["digest"]
    path = toy.store / "objects" / digest / "text.txt"
    assert len(path.read_text()) == len(text)
    edit(path, text)
    return digest


def test_resume_finds_an_altered_input_and_makes_it_again(tmp_path):
    toy = Toy(tmp_path)
    assert toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode == 1
    digest = altered(toy, "c", "jello-HELLO")
    toy.calls()
    result = toy.dflow("resume", "-s", "d.fail_at=-1")
    assert (result.returncode, toy.calls()) == (0, ["join", "steps"]), result.stderr
    assert (
        f'the artifact of node "c" was damaged after its commit: {digest[:12]}: text.txt has other content'
        in result.stderr
    )
    assert toy.text("c") == "hello-HELLO"


def test_resume_reads_no_more_than_what_will_be_read(tmp_path):
    """What nothing will read is not looked at; what a damaged artifact is made from again is."""
    toy = Toy(tmp_path)
    assert toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode == 1
    altered(toy, "b", "JELLO")
    toy.calls()
    assert toy.dflow("resume").returncode == 1
    assert toy.calls() == ["steps"]
    altered(toy, "c", "jello-HELLO")
    assert toy.dflow("resume").returncode == 1
    assert toy.calls() == ["upper", "join", "steps"]
    assert (toy.text("b"), toy.text("c")) == ("HELLO", "hello-HELLO")


def test_what_is_taken_as_it_is_must_be_what_it_was(tmp_path):
    toy = Toy(tmp_path)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    altered(toy, "a", "jello")
    before = toy.state()["run"]
    result = toy.dflow("resume", "--from", "c")
    assert result.returncode == 1
    assert 'the artifact of node "a" was damaged after its commit' in result.stderr
    assert "is missing or damaged in the store; run the node again with `dflow resume" in result.stderr
    assert f"run the node again with `dflow resume {before} --from a`" in result.stderr
    assert toy.state()["run"] == before
