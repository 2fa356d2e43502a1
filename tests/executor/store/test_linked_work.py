"""Links in the folders of work, and notes there that lead out of a store: what is outside stays as it is."""

from __future__ import annotations

import json
import shutil

import pytest
from imitated_runs import dflow, run, toy_pipeline
from link_canary import HASH, OTHER, RUN, look
from manifests import made
from toy_ops import Toy

from dsl.artifact_digest import MANIFEST
from dsl.convert import unstructure
from executor.store.artifact_store import COMMIT, Store
from executor.store.commit_journal import NOTE
from executor.store.lease import Lease
from executor.store.manifest import keep_own_files
from executor.system.hardware import boot_id

NOTED = unstructure(made(HASH, RUN)[0])


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path / "mine")


@pytest.mark.parametrize("field", ["digest", "run"])
def test_no_note_in_a_work_folder_names_a_place_outside_the_store(toy, canary, field):
    """A commit would put the artifact there, and remove what it finds."""
    run(toy)
    store, away = Store.open(toy.store, write=True), "../../../behind the link"
    line = {"digest": OTHER, "run": RUN, "neutral": {}, "acceptance": "computed", "time": 1.0, field: away}
    with store.lease(HASH, RUN) as lease:
        lease.acquire(print)
        lease.out_dir.mkdir()
        (lease.out_dir / "text.txt").write_text("made")
        status = (lease.out_dir / "text.txt").stat()
        files = {"text.txt": [status.st_size, status.st_mtime_ns, status.st_ino]}
        note = {"out": lease.out_dir.name, "boot": boot_id(), "files": files}
        before = look(canary)
        (lease.folder / COMMIT).write_text(json.dumps({**line, "out": lease.out_dir.name}))
        assert store.finish_commit(lease, HASH) is None
        (lease.folder / COMMIT).unlink()
        (lease.folder / NOTE).write_text(json.dumps({**note, "manifest": NOTED, "line": line}))
        digest = store.finish_commit(lease, HASH)
        assert before == look(canary)
    if field == "digest":  # what the note says of it counts for nothing
        assert [digest] == [entry.digest for entry in store.index(HASH)]
        assert "made" == (store.object_path(digest) / "text.txt").read_text()
    else:
        assert (None, []) == (digest, store.index(HASH))


@pytest.mark.parametrize("out", ["out-1-01234567", "../out-2-01234567", "../../../../behind the link", "..", ""])
def test_no_note_in_a_work_folder_leads_a_commit_out_of_it(toy, canary, out):
    """`ended.json` and `commit.json` name the folder that is to be committed: a link, or a way out."""
    run(toy)
    store = Store.open(toy.store, write=True)
    with store.lease(HASH, RUN) as lease:
        lease.acquire(print)
        (lease.folder / "out-1-01234567").symlink_to(canary)
        if out == "../out-2-01234567":
            canary = canary.rename(lease.folder / out)
        files = {
            path.relative_to(canary).as_posix(): [path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino]
            for path in canary.rglob("*")
            if path.is_file()
        }
        (canary / MANIFEST).write_text(json.dumps({"digest": OTHER, "files": {}}))
        line = {"run": RUN, "neutral": {}, "acceptance": "computed"}
        note = {"out": out, "boot": boot_id(), "files": files, "manifest": NOTED, "line": line}
        before = look(canary)
        (lease.folder / NOTE).write_text(json.dumps(note))
        assert store.finish_commit(lease, HASH) is None
        (lease.folder / COMMIT).write_text(json.dumps({**line, "digest": OTHER, "time": 1.0, "out": out}))
        assert store.finish_commit(lease, HASH) is None
        assert (before, []) == (look(canary), store.index(HASH))
        (lease.folder / COMMIT).unlink()
        lease.empty(keep_state=True)
    assert before == look(canary)


def test_a_work_folder_that_is_a_link_is_not_adopted(tmp_path, canary):
    (canary / HASH / "work.json").write_text(json.dumps({"key_without_code": "x"}))
    (canary / HASH / "state").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / HASH).symlink_to(canary / HASH)
    before = look(canary)
    with Lease(tmp_path / "work" / OTHER, RUN) as lease:
        lease.acquire(print)
        assert lease.continue_from("x") is None
    assert before == look(canary)


def test_a_pull_that_goes_on_writes_through_no_link_in_what_was_fetched(toy, canary, tmp_path):
    done = run(toy)
    assert 0 == dflow(toy, "push", str(tmp_path / "shared"), done.run)
    whole = {name: look(toy.store / "objects" / done.state.nodes[name].digest) for name in "ab"}
    other = Toy(toy.folder)
    other.store = tmp_path / "other"
    Store.open(other.store, write=True)
    for name, links in (("a", [""]), ("b", ["text.txt", "sub", MANIFEST])):
        node = done.state.nodes[name]
        fetched = other.store / "work" / node.key / f"pulled-{node.digest[:16]}"
        for link in links:
            (fetched / link).parent.mkdir(parents=True, exist_ok=True)
            (fetched / link).symlink_to(canary / link)
    shutil.copytree(canary / HASH / "sub", canary / "sub")
    before = look(canary)
    assert 0 == dflow(other, "pull", str(tmp_path / "shared"), str(other.file))
    assert before == look(canary)
    for name, expected in whole.items():
        found = look(other.store / "objects" / done.state.nodes[name].digest)
        assert {path: content for path, (_, _, content) in expected.items()} == {
            path: content for path, (_, _, content) in found.items()
        }


def test_what_a_run_keeps_beside_its_artifacts_is_written_through_no_link(toy, canary, tmp_path):
    """Its own measurements, in its record."""
    record = run(toy)
    (tmp_path / "measurements.json").write_text("{}")
    (canary / HASH / "measurements.json").write_text("theirs")
    kept = record.folder / "outside_digest"
    shutil.rmtree(kept)
    kept.symlink_to(canary)
    before = look(canary)
    keep_own_files(record.folder, HASH, tmp_path)
    kept_here = kept / HASH / "measurements.json"
    assert (False, "{}") == (kept.is_symlink(), kept_here.read_text())
    assert before == look(canary)
