"""The order of the commit protocol, commits that were cut off, and stores that other versions of dflow wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import attrs
import pytest
from manifests import made
from toy_ops import PROJECT

from dsl.errors import DiskFull, LeaseLost, StageError, StopRequested, StoreError
from executor.store import artifact_store as store_module
from executor.store import commit_journal as ended_module
from executor.store.artifact_store import COMMIT, FORMAT, Store
from executor.store.lease import share_ranks
from executor.system.crash_points import FAIL_POINTS


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "a store, größer", write=True)


def started(store, key="k1", run="r1", text="hello"):
    """A lease on a work folder in which a stage has written its output."""
    lease = store.lease(key, run)
    lease.acquire(print)
    lease.empty(keep_state=False)
    (lease.out_dir / "sub" / "subsub").mkdir(parents=True)
    (lease.out_dir / "sub" / "subsub" / "text.txt").write_text(text)
    (lease.out_dir / "other.txt").write_text("other")
    return lease


def commit(store, lease, key="k1"):
    manifest, line = made(key)
    return store.commit(lease, manifest, attrs.evolve(line, neutral={"batch": 4}))


def test_every_fail_point_is_in_the_table_and_every_line_of_the_table_is_one():
    called = set()
    for path in (PROJECT / "executor").rglob("*.py"):
        called |= set(re.findall(r'\bfail_point\(\s*"([^"]+)"', path.read_text()))
    assert set(FAIL_POINTS) == called


def test_everything_is_on_disk_before_the_next_step_makes_use_of_it(store, monkeypatch):
    """Files before their folders, these before the artifact's name, that before its line in the index."""
    happened = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        happened.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(store.path).as_posix()))
        real_fsync(descriptor)

    def rename(path, target):
        happened.append(("rename", target.relative_to(store.path).as_posix()))
        return real_rename(path, target)

    lease = started(store)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    digest = commit(store, lease)
    placed = happened.index(("rename", f"objects/{digest}"))
    out = lease.out_dir.relative_to(store.path).as_posix()
    before = [path for kind, path in happened[:placed] if kind == "sync" and path.startswith(out)]
    files = [f"{out}/sub/subsub/text.txt", f"{out}/sub/subsub", f"{out}/sub", f"{out}/other.txt"]
    assert {*files, out} <= set(before)
    assert any(path.startswith(f"{out}/.manifest.json") for path in before)  # it has its name a moment later
    assert out == before[-1]
    assert sorted(files[:3], key=before.index) == files[:3]
    assert [("sync", "objects"), ("sync", "index/k1"), ("sync", "index")] == happened[placed + 1 :]


def test_a_commit_takes_few_system_calls_that_wait_for_the_disk(store, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), real(descriptor)))
    with store.lease("k1", "r1") as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "text.txt").write_text("hello")
        commit(store, lease)
        lease.remove()
    assert len(synced) <= 8


def test_a_commit_that_found_no_room_for_its_line_is_finished_by_the_next_holder(store, monkeypatch):
    def full(path, value, *, durable):
        raise DiskFull("disk full")

    with started(store) as lease, pytest.raises(DiskFull):
        monkeypatch.setattr(store_module, "append_line", full)
        commit(store, lease)
    monkeypatch.undo()
    assert store.index("k1") == []
    later = Store(store.path)
    with later.lease("k1", "r2") as lease:
        lease.acquire(print)
        digest = later.finish_commit(lease, "k1")
        assert digest == later.finish_commit(lease, "k1")
    assert [("r1", digest, {"batch": 4})] == [(line.run, line.digest, line.neutral) for line in later.index("k1")]
    assert [] == later.altered(digest)


def test_a_commit_that_was_cut_off_before_the_rename_is_finished_unless_its_files_were_altered(store, monkeypatch):
    for number, alter in enumerate((False, True)):
        key = f"k{number}"
        with started(store, key, text=key) as lease, pytest.raises(StoreError, match="cut off"):
            monkeypatch.setattr(Store, "_place", cut_off)
            commit(store, lease, key)
        monkeypatch.undo()
        if alter:
            path = lease.out_dir / "other.txt"
            path.chmod(0o644)
            path.write_text("OTHER")
        with store.lease(key, "r2") as lease:
            lease.acquire(print)
            finished = store.finish_commit(lease, key)
        assert (not alter) == (finished is not None)
        assert (not alter) == bool(store.index(key))


def cut_off(*arguments):
    raise StoreError("cut off")


def test_what_a_crash_of_the_machine_left_of_a_commit_is_no_commit(store):
    with started(store) as lease:
        for rest in ("", "{", "[]", '{"run": "r1"}', json.dumps({"digest": "gone", "run": "r1", "time": 1.0})):
            (lease.folder / COMMIT).write_text(rest)
            assert store.finish_commit(lease, "k1") is None
    assert store.index("k1") == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {"other.txt": {"size": 4, "sha256": "x"}}}'])
def test_an_artifact_whose_manifest_a_crash_emptied_is_never_used_and_made_again(store, text):
    with started(store) as lease:
        digest = commit(store, lease)
    path = store.object_path(digest) / "manifest.json"
    path.chmod(0o644)
    path.write_text(text)
    fresh = Store.open(store.path, write=True)
    assert (False, None) == (fresh.has(digest), fresh.manifest(digest))
    with started(fresh, run="r2") as lease:
        assert digest == commit(fresh, lease)
    assert (True, []) == (fresh.has(digest), fresh.altered(digest))


def test_who_had_a_folder_that_was_removed_and_made_anew_can_neither_write_nor_commit(store):
    """The tokens of both are 1, since they count from the folder's beginning."""
    first = started(store, text="late")
    shutil.rmtree(first.folder)
    second = started(store, text="early")
    assert (1, 1) == (first.token, second.token)
    with pytest.raises(LeaseLost, match="passed to another attempt"):
        share_ranks(first.folder, first.token, first.id)
    with pytest.raises(LeaseLost, match="the work folder was removed or replaced while the stage ran"):
        commit(store, first)
    first.release()
    shutil.rmtree(second.folder)
    second.release()
    third = started(store, text="early")
    digest = commit(store, third)
    assert (third.token, third.id) == (store.manifest(digest).token, store.manifest(digest).lease)
    third.remove()


def test_what_a_newer_dflow_adds_to_lines_and_manifests_of_this_layout_is_passed_over(store):
    with started(store) as lease:
        digest = commit(store, lease)
    path = store.object_path(digest) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.chmod(0o644)
    entries = {name: {**entry, "blake3": "0"} for name, entry in manifest["files"].items()}
    path.write_text(json.dumps({**manifest, "files": entries, "signed by": ["somebody"], "format": 7}))
    with (store.path / "index" / "k1").open("a") as file:
        newer = {"digest": digest, "time": 5.0, "neutral": {"batch": 4}, "run": "r9", "cost": {"dollars": 3}}
        file.write(json.dumps(newer) + "\n")
        file.write(json.dumps({"withdrawn": digest, "time": 6.0}) + "\n")
    (store.path / "attestations").mkdir()
    fresh = Store.open(store.path, write=True)
    assert [("r1", digest), ("r9", digest)] == [(line.run, line.digest) for line in fresh.index("k1")]
    assert (True, []) == (fresh.has(digest), fresh.altered(digest))


def test_what_an_older_dflow_left_out_of_lines_and_leases_is_taken_as_usual(store):
    with started(store) as lease:
        digest = commit(store, lease)
    (store.path / "index" / "k1").write_text(json.dumps({"digest": digest, "run": "r0", "time": 5.0}) + "\n")
    line = store.index("k1")[0]
    assert ({}, "computed") == (line.neutral, line.acceptance)
    (store.path / "work" / "k2").mkdir()
    old = {"token": 3, "host": os.uname().nodename, "pid": 1, "run": "r0", "released": False}
    (store.path / "work" / "k2" / "lease").write_text(json.dumps(old))
    with store.lease("k2", "r2") as lease:
        lease.acquire(print)
        assert (4, "r0") == (lease.token, lease.last_run)


@pytest.mark.parametrize("layout", [FORMAT - 1, FORMAT + 1])
def test_a_store_of_another_layout_is_refused_and_left_alone(store, layout):
    (store.path / "format").write_text(f"{layout}\n")
    before = sorted(path.name for path in store.path.iterdir())
    for write in (False, True):
        with pytest.raises(StoreError, match=f"has layout {layout}, this version of dflow uses layout {FORMAT};"):
            Store.open(store.path, write=write)
    assert before == sorted(path.name for path in store.path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_work_folder_without_permission_is_one_line(store):
    (store.path / "work").chmod(0o555)
    with pytest.raises(StoreError, match=r"work.*this user has no permission"):
        store.lease("k", "r").acquire(print)


def cut_off_after_the_end(store, monkeypatch):
    """A stage that has ended, whose commit came as far as the manifest, and the work folder that is left."""
    with started(store) as lease, pytest.raises(StoreError, match="cut off"):
        monkeypatch.setattr(Store, "place", cut_off)
        commit(store, lease)
    monkeypatch.undo()
    (lease.folder / COMMIT).unlink()
    return lease


def finished(store):
    with store.lease("k1", "r2") as lease:
        lease.acquire(print)
        return store.finish_commit(lease, "k1")


def test_a_stage_that_has_ended_is_committed_by_the_next_holder_with_its_own_manifest(store, monkeypatch):
    first = cut_off_after_the_end(store, monkeypatch)
    digest = finished(store)
    manifest = store.manifest(digest)
    assert (first.token, first.id, "make") == (manifest.token, manifest.lease, manifest.op)
    assert {"other.txt", "sub/subsub/text.txt"} == set(manifest.files)
    assert ([("r1", digest)], []) == ([(line.run, line.digest) for line in store.index("k1")], store.altered(digest))


@pytest.mark.parametrize("how", ["written", "added", "removed", "another boot", "another key", "half a note"])
def test_what_is_not_as_a_stage_left_it_is_not_committed(store, monkeypatch, how):
    first = cut_off_after_the_end(store, monkeypatch)
    note, file = first.folder / ended_module.NOTE, first.out_dir / "other.txt"
    if how == "written":
        file.chmod(0o644)
        file.write_text("OTHER")
    if how == "added":
        (first.out_dir / "more.txt").write_text("more")
    if how == "removed":
        file.unlink()
    if how == "another boot":
        monkeypatch.setattr(ended_module, "boot_id", lambda: "0")
    if how == "another key":
        noted = json.loads(note.read_text())
        note.write_text(json.dumps({**noted, "manifest": {**noted["manifest"], "key": "k2"}}))
    if how == "half a note":
        note.write_text(note.read_text()[:50])
    assert (None, []) == (finished(store), store.index("k1"))


def test_a_stage_whose_output_is_refused_is_not_taken_for_one_that_only_lacks_its_commit(store):
    with started(store) as lease:
        (lease.out_dir / "link").symlink_to("other.txt")
        with pytest.raises(StageError, match="link"):
            commit(store, lease)
    assert finished(store) is None


def test_a_commit_that_is_given_up_is_finished_by_the_next_holder(store):
    with started(store) as lease:
        lease.give_up()
        with pytest.raises(StopRequested, match="the next one continues here"):
            commit(store, lease)
    digest = finished(store)
    assert (True, ["r1"]) == (store.has(digest), [line.run for line in store.index("k1")])
