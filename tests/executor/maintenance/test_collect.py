"""What `dflow gc` removes, and what it never touches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imitated_runs import artifacts, begin, edit, ended, execute, planned, run, run_again, toy_pipeline
from manifests import made, new_record
from toy_ops import PROJECT, Toy

from dsl.errors import StoreError
from dsl.files import append_lines, read_lines
from executor.maintenance.gc import collect, survey
from executor.records.run_record import find_record
from executor.records.run_tags import add_tag
from executor.store.artifact_store import Store
from executor.store.integrity import VERIFIED, check, set_aside
from executor.system.stamps import SEEN

UNKNOWN_KEY = "5" * 64  # of which no record knows


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path)


def digests(*records):
    return {node.digest for record in records for node in record.state.nodes.values() if node.digest}


def work_folders(toy):
    return {path.name for path in (toy.store / "work").iterdir()}


def gc(toy, keep, **options):
    return collect(Store.open(toy.store, write=True), keep=keep, **options)


def test_nothing_is_removed_unless_it_is_said(toy):
    run(toy)
    before = artifacts(toy)
    found = survey(Store.open(toy.store, write=False), keep=0)
    assert {item.path.name for item in found.goes} == before == artifacts(toy)
    assert found.freed == sum(path.stat().st_size for path in toy.store.glob("objects/**/*") if path.is_file())


def test_the_last_runs_of_every_pipeline_keep_what_they_use(toy):
    other = run(toy, "c.between=one", name="other", contents="other")
    run(toy, "c.between=two", contents="old")
    newest = run(toy, "c.between=three", contents="new")
    gc(toy, 1)
    assert artifacts(toy) == digests(other, newest)
    assert {path.name for path in (toy.store / "index").iterdir()} == {
        node.key for record in (other, newest) for node in record.state.nodes.values()
    }


def test_no_number_of_failures_takes_the_last_good_run_its_place(toy):
    good = run(toy, contents="good")
    failed = [run(toy, f"a.text=bad {number}", fail_at="a") for number in range(10)]
    gc(toy, 3)
    assert artifacts(toy) == digests(good)
    assert work_folders(toy) == {record.state.nodes["a"].key for record in failed}
    for number in range(3):
        run(toy, f"a.text=fine {number}", contents=f"fine {number}")
    gc(toy, 3)
    assert digests(good) & artifacts(toy) == set()
    assert work_folders(toy) == set()


def test_what_was_accepted_stays_until_a_run_used_it(toy):
    """Its run need not be among those that are kept."""
    old = run(toy, contents="old")
    node = old.state.nodes["b"]
    store = Store.open(toy.store, write=True)
    store.accept("f" * 64, attrs.evolve(store.newest(node.key), acceptance="accepted", accepted_key=node.key))
    new = run(toy, "a.text=new", contents="new")
    gc(toy, 1)
    assert artifacts(toy) == digests(new) | {node.digest}
    new.state.nodes["b"].key = "f" * 64
    new.save_node("b")
    gc(toy, 1)
    assert artifacts(toy) == digests(new)


def test_a_tagged_run_keeps_what_it_uses(toy):
    first = run(toy, contents="first")
    add_tag(first.folder, "best")
    run(toy, "a.text=x", contents="x")
    gc(toy, 0)
    assert artifacts(toy) == digests(first)


def test_a_running_run_keeps_what_it_counts_on(toy):
    """It has planned to take everything, and has not come to any node yet."""
    run(toy)
    before = artifacts(toy)
    session = begin(toy)
    assert gc(toy, 0).goes == ()
    execute(session)
    assert artifacts(toy) == before
    assert len(gc(toy, 0).goes) == len(before)


def test_a_running_run_keeps_what_may_yet_be_cut_off(toy):
    """Below a node that runs anew no key is known, but the same bytes as before would give the same keys again."""
    run(toy, contents="same")
    before = artifacts(toy)
    session = begin(toy, "a.text=other")
    assert {node_id: decision.cache for node_id, decision in session.planner.plan().items()} == {
        "a": "miss", "b": "maybe", "c": "maybe", "d": "maybe"
    }  # fmt: skip
    gc(toy, 0)
    assert artifacts(toy) == before
    execute(session, contents="same")
    assert artifacts(toy) == before


def test_what_a_running_run_has_just_committed_stays_before_its_record_says_so(toy):
    session = begin(toy)
    store = session.store
    with store.lease(UNKNOWN_KEY, session.record.run) as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "text.txt").write_text("fresh")
        digest = store.commit(lease, *made(UNKNOWN_KEY, session.record.run))
        gc(toy, 0)
        assert artifacts(toy) == {digest}
        assert work_folders(toy) == {lease.folder.name}
        lease.remove()
    gc(toy, 0)
    assert artifacts(toy) == {digest}
    ended(session.record, "stopped")


def test_what_was_committed_by_a_run_that_died_before_its_record_said_so_is_there_when_it_goes_on(toy):
    session = begin(toy)
    store, key = session.store, session.planner.decide("a", {}).key
    with store.lease(key, session.record.run) as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "text.txt").write_text("fresh")
        digest = store.commit(lease, *made(key, session.record.run))
    ended(session.record, "running")
    gc(toy, 1)
    assert (artifacts(toy), work_folders(toy)) == ({digest}, {key})
    with store.lease(key, session.record.run) as lease:
        lease.acquire(print)
        lease.remove()
    gc(toy, 1)
    assert artifacts(toy) == {digest}
    gc(toy, 0)
    assert (artifacts(toy), work_folders(toy)) == (set(), set())


def test_what_a_run_was_to_take_as_it_is_stays_though_it_died_before_it_began(toy):
    first = run(toy, contents="first")
    taken = first.state.nodes["a"].digest
    new_record(toy.store / "records", first.graph(), pinned={"a": taken})
    shutil.rmtree(first.folder)
    gc(toy, 1)
    assert artifacts(toy) == {taken}


def test_a_commit_that_was_cut_off_can_be_completed(toy, monkeypatch):
    """The artifact is in its place, and the line of the index is not written yet."""
    session = begin(toy)
    store = session.store
    monkeypatch.setattr(store, "_append", lambda key, entry: None)
    with store.lease(UNKNOWN_KEY, session.record.run) as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        (lease.out_dir / "text.txt").write_text("fresh")
        digest = store.commit(lease, *made(UNKNOWN_KEY, session.record.run))
    ended(session.record, "stopped")
    gc(toy, 1)
    assert artifacts(toy) == {digest}
    fresh = Store.open(toy.store, write=True)
    with fresh.lease(UNKNOWN_KEY, session.record.run) as lease:
        lease.acquire(print)
        assert (fresh.finish_commit(lease, UNKNOWN_KEY), fresh.newest(UNKNOWN_KEY).digest) == (digest, digest)


def test_unfinished_work_stays_while_its_run_is_kept(toy):
    failed = run(toy, fail_at="c")
    run(toy, "a.text=x", name="other", contents="x")
    gc(toy, 1)
    assert work_folders(toy) == {failed.state.nodes["c"].key}
    run(toy, "a.text=y", contents="y")
    gc(toy, 1)
    assert work_folders(toy) == set()


def test_work_that_somebody_holds_stays(toy):
    store = Store.open(toy.store, write=True)
    with store.lease(UNKNOWN_KEY, "r") as lease:
        lease.acquire(print)
        found = gc(toy, 0)
        assert [(item.kind, item.why) for item in found.stays] == [
            ("work", f"process {os.getpid()} on {os.uname().nodename} (run r) works on it")
        ]
        lease.check()
    gc(toy, 0)
    assert work_folders(toy) == set()


def test_work_that_a_process_of_another_machine_may_still_write_stays(toy):
    store = Store.open(toy.store, write=True)
    with store.lease(UNKNOWN_KEY, "r") as lease:
        lease.acquire(print)
    (lease.folder / "actors-job.json").touch()
    assert ["a stage on a Ray cluster may" in item.why for item in gc(toy, 0).stays] == [True]
    assert work_folders(toy) == {UNKNOWN_KEY}


def test_damaged_artifacts_and_the_rest_of_a_killed_gc_go(toy):
    kept = run(toy)
    store = Store.open(toy.store, write=True)
    edit(store.object_path(kept.state.nodes["d"].digest) / "sub" / "text.txt", "x")
    set_aside(store, [kept.state.nodes["d"].digest])
    (toy.store / "objects" / f".gone-{UNKNOWN_KEY}-1").mkdir()
    (toy.store / "work" / f".{UNKNOWN_KEY}.{32 * '0'}").mkdir()
    assert sorted(item.kind for item in survey(store, keep=1).goes) == ["leftover"] * 3
    gc(toy, 1)
    assert artifacts(toy) == digests(kept) - {kept.state.nodes["d"].digest}
    assert (store.newest(kept.state.nodes["d"].key) is not None, work_folders(toy)) == (True, set())


def test_memos_keep_only_the_lines_of_artifacts_that_stay(toy):
    gone, kept = run(toy, contents="old"), run(toy, "a.text=new", contents="new")
    store = Store.open(toy.store, write=True)
    check(store, digests(gone, kept))
    lines = [{"digest": digest, "name": "text.txt"} for digest in sorted(digests(gone, kept))]
    for name in (VERIFIED, SEEN):
        append_lines(store.memos / name, lines)
    collect(store, keep=1)
    for name in (VERIFIED, SEEN):
        assert {line["digest"] for line in read_lines(store.memos / name)} == digests(kept)


def test_a_key_does_not_fall_back_to_an_older_result_when_the_kept_one_is_damaged(toy):
    first = run(toy, contents="first")
    second = run_again(toy, first, "d", contents="second")
    store = Store.open(toy.store, write=True)
    set_aside(store, [second.state.nodes["d"].digest])
    gc(toy, 1)
    assert planned(toy, second)["d"].cache == "miss"


def test_pulled_artifacts_stay_until_a_run_used_them(toy):
    record = run(toy)
    index = toy.store / "index" / record.state.nodes["a"].key
    index.write_text(index.read_text().replace("computed", "pulled"))
    used = gc(toy, 0)
    assert len(used.goes) == 4
    record = run(toy, contents="pulled")
    index.write_text(index.read_text().replace("computed", "pulled"))
    shutil.rmtree(record.folder)
    record.folder.mkdir()
    gc(toy, 0)
    assert artifacts(toy) == {record.state.nodes["a"].digest}
    gc(toy, 0, pulled=False)
    assert artifacts(toy) == set()


def test_a_record_that_cannot_be_read_stops_it(toy):
    record = run(toy)
    (record.folder / "events.jsonl").write_text("{}\n")
    before = artifacts(toy)
    with pytest.raises(StoreError, match=rf"it is not known what it uses; remove it with `dflow rm {record.run}`"):
        gc(toy, 0)
    assert artifacts(toy) == before


def test_lines_of_a_newer_dflow_keep_what_this_one_does_not_know(toy):
    first = run(toy, contents="first")
    key = first.state.nodes["d"].key
    second = run_again(toy, first, "d", contents="second")
    index = toy.store / "index" / key
    index.write_text(index.read_text().replace('"digest"', '"unknown":{"x":1},"digest"'))
    lines = index.read_text().splitlines()
    gc(toy, 1)
    assert index.read_text().splitlines() == lines[1:]
    assert second.state.nodes["d"].digest in lines[1]


@pytest.mark.parametrize("place", ["gc:indexed", "gc:renaming", "gc:renaming:3", "gc:renamed", "gc:removed"])
def test_a_gc_that_is_killed_leaves_a_whole_store(toy, place):
    run(toy, contents="old", fail_at="d")
    kept = run(toy, "a.text=x", contents="new")
    program = "import sys, executor.cli; sys.exit(executor.cli.main())"
    killed = subprocess.run(
        [sys.executable, "-c", program, "gc", "--keep", "1", "--delete", "--store", str(toy.store)],
        env={**os.environ, "PYTHONPATH": str(PROJECT), "DFLOW_FAIL_AT": place},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    if place.startswith("gc:renam"):  # whole, under a name that nobody takes for an artifact
        gone = [path for path in (toy.store / "objects").iterdir() if path.name.startswith(".gone-")]
        assert gone and all((path / "manifest.json").exists() for path in gone)
    assert {decision.cache for decision in planned(toy, kept).values()} == {"hit"}
    gc(toy, 1)
    assert artifacts(toy) == digests(kept)
    assert work_folders(toy) == set()


def test_runs_go_on_while_everything_else_is_removed_again_and_again(tmp_path):
    """Nothing is kept but what runs count on: what one left behind is at times taken by the next, at times gone."""
    toy = Toy(tmp_path)
    ended = threading.Event()
    removed = []

    def collect_all_the_time():
        while not ended.is_set():
            if (toy.store / "format").exists():
                removed.extend(item.label for item in gc(toy, 0).goes)

    collecting = threading.Thread(target=collect_all_the_time)
    collecting.start()
    try:
        runs = [toy.dflow("run", str(toy.file), "-s", f"a.text={text}") for text in ("x", "y", "x", "x")]
    finally:
        ended.set()
        collecting.join()
    assert [result.returncode for result in runs] == [0] * 4, [result.stderr for result in runs]
    assert removed


NAMES = st.sampled_from(["toy", "other"])
VALUES = st.sampled_from(["x", "y", "z"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), NAMES, VALUES, st.sampled_from([None, None, "b", "d"])),
        st.tuples(st.just("again"), st.sampled_from(["a", "b", "c", "d"]), VALUES),
        st.tuples(st.just("tag")),
        st.tuples(st.just("gc"), st.integers(0, 2)),
    ),
    min_size=1,
    max_size=6,
)


def play(toy, actions):
    """Some history of a store; the runs that were finished and those that were not."""
    records = []
    for number, (action, *values) in enumerate(actions):
        done = [record for record in records if record.state.status == "done"]
        if action == "run":
            name, value, fail_at = values
            records.append(run(toy, f"a.text={value}", name=name, fail_at=fail_at))
        elif action == "again" and done and digests(done[-1]) <= artifacts(toy):
            records.append(run_again(toy, done[-1], values[0], contents=values[1]))
        elif action == "tag" and records:
            add_tag(records[number % len(records)].folder, f"tag{number}")
        elif action == "gc":
            gc(toy, values[0])
    return records


@settings(max_examples=30)
@given(actions=ACTIONS, keep=st.integers(0, 3))
def test_whatever_happened_before_what_kept_runs_had_is_there_after(actions, keep):
    with TemporaryDirectory() as folder:
        toy = toy_pipeline(Path(folder))
        play(toy, actions)
        store = Store.open(toy.store, write=True)
        kept = survey(store, keep=keep).kept
        before = {each.record.run: planned(toy, each.record) for each in kept}
        unfinished = work_folders(toy) & {
            node.key for each in kept if each.unfinished for node in each.record.state.nodes.values()
        }
        here = {digest for each in kept for digest in digests(each.record) if store.has(digest)}
        gc(toy, keep)
        fresh = Store.open(toy.store, write=False)
        assert check(fresh, here) == {}
        for each in kept:
            assert find_record(fresh.records, each.record.run).state.status == each.record.state.status
            after = planned(toy, each.record)
            # What another run has made for a node that this one never came to is not this one's.
            own = {node_id for node_id, node in each.record.state.nodes.items() if node.digest}
            hits = own & {node_id for node_id, decision in before[each.record.run].items() if decision.cache == "hit"}
            assert hits <= {node_id for node_id, decision in after.items() if decision.cache == "hit"}
        assert unfinished <= work_folders(toy)
        assert (survey(fresh, keep=keep).goes, survey(fresh, keep=keep).dropped) == ((), {})
        indexed = {line.digest for path in (toy.store / "index").iterdir() for line in fresh.index(path.name)}
        assert artifacts(toy) <= indexed
