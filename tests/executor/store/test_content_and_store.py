"""The digest of an artifact, the layout of the store, and what a store refuses."""

import errno
import fcntl
import json
import time
from pathlib import Path

import attrs
import pytest
from manifests import made

from dsl.errors import LeaseLost, StageError, StoreError
from executor.store import artifact_store as store_module
from executor.store.artifact_store import FORMAT, Store, store_path
from executor.store.digests import FileEntry, artifact_digest, seal_artifact_files

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


def commit(store, key="k1", run="r1", text="hello", acceptance="computed"):
    with store.lease(key, run) as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "sub").mkdir()
        (lease.out_dir / "sub" / "text.txt").write_text(text)
        (lease.out_dir / "measurements.json").write_text(json.dumps(time.time()))
        manifest, line = made(key, run)
        digest = store.commit(lease, manifest, attrs.evolve(line, neutral={"batch": 4}, acceptance=acceptance))
        lease.remove()
    return digest


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "runs", write=True)


def test_the_digest_of_an_artifact_is_this_one():
    files = {"sub/text.txt": FileEntry(5, HELLO), "a": FileEntry(0, "00")}
    assert artifact_digest(files) == "7bbd7e4941b8073d54c7d27bf03276fa423762989549658297bed715a3f978fd"


def test_measurements_and_the_manifest_stay_out_of_the_digest():
    files = {"a": FileEntry(5, HELLO)}
    more = {**files, "measurements.json": FileEntry(1, "01"), "manifest.json": FileEntry(2, "02")}
    assert artifact_digest(more) == artifact_digest(files)


@pytest.mark.parametrize(
    "files",
    [
        {"b": FileEntry(5, HELLO)},
        {"a": FileEntry(6, HELLO)},
        {"a": FileEntry(5, "00")},
        {"sub/measurements.json": FileEntry(5, HELLO)},
    ],
)
def test_name_size_and_content_enter_the_digest(files):
    assert artifact_digest(files) != artifact_digest({"a": FileEntry(5, HELLO)})


def test_a_link_in_out_dir_is_an_error(tmp_path):
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(StageError, match="link: the op left something that is not a plain file"):
        seal_artifact_files(tmp_path)


def test_a_commit_leaves_this_layout(store):
    digest = commit(store)
    found = sorted(path.relative_to(store.path).as_posix() for path in store.path.rglob("*") if path.is_file())
    expected = [f"objects/{digest}/{name}" for name in ("manifest.json", "measurements.json", "sub/text.txt")]
    assert found == [".id", "format", "gc.lock", "index/k1", *expected]
    assert (store.path / "format").read_text() == f"{FORMAT}\n"
    assert {
        oct((store.object_path(digest) / name).stat().st_mode & 0o777) for name in ("manifest.json", "sub/text.txt")
    } == {"0o444"}


def test_the_manifest_and_the_index_line_say_this(store):
    digest = commit(store)
    manifest = store.manifest(digest)
    assert manifest.files["sub/text.txt"] == FileEntry(5, HELLO)
    assert (manifest.op, manifest.key, manifest.token, manifest.digest) == ("make", "k1", 1, digest)
    line = json.loads((store.path / "index" / "k1").read_text())
    written = line.pop("time")
    assert abs(time.time() - written) < 60
    assert line == {"digest": digest, "run": "r1", "neutral": {"batch": 4}, "acceptance": "computed"}


def test_the_newest_index_line_wins_and_a_torn_one_is_skipped(store):
    first = commit(store)
    with (store.path / "index" / "k1").open("a") as file:
        file.write('{"digest": "torn')
    second = commit(store, run="r2", text="other", acceptance="forced")
    assert store.newest("k1").digest == second
    assert [(line.digest, line.run, line.acceptance) for line in store.index("k1")] == [
        (first, "r1", "computed"),
        (second, "r2", "forced"),
    ]


def test_the_same_content_under_another_key_is_kept_once(store):
    first = commit(store, key="k1")
    inode = (store.object_path(first) / "sub/text.txt").stat().st_ino
    assert commit(store, key="k2") == first
    assert (store.object_path(first) / "sub/text.txt").stat().st_ino == inode


def test_an_artifact_with_a_file_of_another_size_is_absent_and_can_be_made_again(store, tmp_path):
    digest = commit(store)
    path = store.object_path(digest) / "sub/text.txt"
    path.chmod(0o644)
    path.write_text("hell")
    fresh = Store.open(store.path, write=True)
    assert fresh.has(digest) is False
    assert commit(fresh, run="r2") == digest
    assert fresh.has(digest) is True
    assert path.read_text() == "hello"


def test_a_file_that_was_edited_to_the_same_size_is_found_by_reading_and_can_be_made_again(store):
    digest = commit(store)
    path = store.object_path(digest) / "sub/text.txt"
    path.chmod(0o644)
    path.write_text("jello")
    assert (True, ["sub/text.txt"]) == (store.has(digest), store.altered(digest))
    assert commit(store, run="r2") == digest
    assert ("hello", []) == (path.read_text(), store.altered(digest))


def test_what_a_killed_commit_put_aside_is_in_nobodys_way(store):
    digest = commit(store)
    (store.object_path(digest) / "sub/text.txt").unlink()
    with store.lease("k1", "r2") as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "sub").mkdir()
        (lease.out_dir / "sub" / "text.txt").write_text("hello")
        (lease.folder / "altered").mkdir()
        (lease.folder / "altered" / "text.txt").write_text("hell")
        assert Store(store.path).commit(lease, *made("k1", "r2")) == digest
    assert (store.object_path(digest) / "sub/text.txt").read_text() == "hello"


def test_an_op_that_wrote_nothing_has_no_artifact(store):
    with store.lease("k", "r") as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        with pytest.raises(StageError, match=r"the op wrote nothing to stage\.out_dir"):
            store.commit(lease, *made("k", "r"))


def test_a_stage_whose_work_folder_was_replaced_cannot_commit(store):
    with store.lease("k", "r") as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "a").write_text("a")
        (lease.folder / "lease").unlink()
        (lease.folder / "lease").write_text("{}")
        with pytest.raises(LeaseLost, match="was removed or replaced while the stage ran"):
            store.commit(lease, *made("k", "r"))
    assert list((store.path / "objects").iterdir()) == []


@pytest.mark.parametrize("write", [False, True])
def test_a_file_or_a_folder_of_other_things_is_no_store(tmp_path, write):
    (tmp_path / "cat.png").write_text("")
    with pytest.raises(StoreError, match=r"cat\.png is not a folder"):
        Store.open(tmp_path / "cat.png", write=write)
    with pytest.raises(StoreError, match="holds other files and is not a dflow store"):
        Store.open(tmp_path, write=write)


def test_a_folder_that_a_repository_keeps_by_a_page_becomes_a_store_and_keeps_the_page(tmp_path):
    (tmp_path / "README.md").write_text("what lies here")
    Store.open(tmp_path, write=True)
    assert "what lies here" == (tmp_path / "README.md").read_text()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used: Not a directory"):
        Store.open(tmp_path / "file" / "runs", write=True)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StoreError, match=r"locks \(flock\) do not work on this file system \(No locks available\)"):
        Store.open(tmp_path, write=True)


def test_locks_that_keep_nobody_out_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    with pytest.raises(StoreError, match="are not exclusive"):
        Store.open(tmp_path, write=True)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("has_objects", [False, True])
def test_a_store_that_another_process_makes_while_it_is_opened_is_a_store(tmp_path, monkeypatch, has_objects, write):
    read = store_module.read_json_or_none

    def early(path):
        found = read(path)
        monkeypatch.undo()
        Store.open(tmp_path, write=True)
        if not has_objects:
            (tmp_path / "objects").rmdir()
        return found

    monkeypatch.setattr(store_module, "read_json_or_none", early)
    Store.open(tmp_path, write=write)
    assert json.loads((tmp_path / "format").read_text()) == FORMAT


def test_a_file_that_another_process_replaces_while_its_lock_is_tried_keeps_others_out(tmp_path, monkeypatch):
    open_path = Path.open

    def replaced(path, *mode, **others):
        file = open_path(path, *mode, **others)
        if path.name == "format" and mode == ("r+b",):
            (tmp_path / "fresh").write_text(f"{FORMAT}\n")
            (tmp_path / "fresh").replace(path)
        return file

    Store.open(tmp_path, write=True)
    monkeypatch.setattr(Path, "open", replaced)
    Store.open(tmp_path, write=True)


def test_opening_for_reading_makes_nothing(tmp_path):
    store = Store.open(tmp_path / "runs", write=False)
    assert (store.newest("k"), store.has("d"), (tmp_path / "runs").exists()) == (None, False, False)


def test_the_store_lies_in_the_project_of_the_pipeline_file(tmp_path, monkeypatch):
    monkeypatch.delenv("DFLOW_STORE", raising=False)
    (tmp_path / "project" / "pipelines").mkdir(parents=True)
    file = tmp_path / "project" / "pipelines" / "p.toml"
    assert store_path(None, file) == file.parent / "runs"
    (tmp_path / "project" / "pyproject.toml").write_text("")
    assert store_path(None, file) == tmp_path / "project" / "runs"
    monkeypatch.setenv("DFLOW_STORE", str(tmp_path / "named"))
    assert store_path(None, file) == tmp_path / "named"
    assert store_path(str(tmp_path / "given"), file) == tmp_path / "given"
    assert store_path(str(tmp_path / "a" / ".." / "given"), file) == tmp_path / "given"
    monkeypatch.delenv("DFLOW_STORE")
    dotted = tmp_path / "elsewhere" / ".." / file.relative_to(tmp_path)
    assert store_path(None, dotted) == store_path(None, file)
    (tmp_path / "link").symlink_to(file.parent)
    assert store_path(None, tmp_path / "link" / ".." / "p.toml") == tmp_path / "project" / "runs"
