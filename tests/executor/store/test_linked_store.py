"""What a link in a store leads to stays as it is: names, contents, modes and times."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from imitated_runs import artifacts, dflow, run, toy_pipeline
from link_canary import HASH, OTHER, RUN, STRANGE_NAMES, look
from toy_ops import ONE_NODE, Toy

from dsl.artifact_digest import MANIFEST
from dsl.errors import StoreError
from dsl.files import appended, new_file, open_own
from executor.records.run_record import Record, serving
from executor.records.run_tags import add_tag
from executor.store.artifact_store import Store


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path / "mine")


WRITING = [
    "run FILE", "run FILE --smoke 3", "resume", "gc --delete --keep 0", "rm RUN --yes", "runs --tag best RUN",
    "doctor --verify", "pull SHARED FILE", "sync --all", "diagnose RUN",
    "accept FILE a --reason why --yes",
]  # fmt: skip
READING = [
    "status", "plan FILE", "gc --keep 0", "gc --usage", "push SHARED RUN", "runs", "logs a", "report RUN",
    "plan FILE --why a", "doctor",
]  # fmt: skip


@pytest.mark.parametrize("name", ["objects", "index", "work", "records", "smoke"])
def test_what_is_behind_a_linked_folder_of_a_store_stays(toy, canary, tmp_path, capsys, name):
    """The real folder of a store that was used, with other things beside what dflow put there."""
    done = run(toy, "a.text=x")
    run(toy, fail_at="d", contents="other")
    assert 0 == dflow(toy, "push", str(tmp_path / "shared"), done.run)
    linked = toy.store / name
    linked.mkdir(exist_ok=True)
    for path in linked.iterdir():
        shutil.move(path, canary / path.name)
    linked.rmdir()
    linked.symlink_to(canary)
    before = look(canary)
    words = {"FILE": str(toy.file), "SHARED": str(tmp_path / "shared"), "RUN": done.run}
    for command in (*READING, *WRITING):
        capsys.readouterr()
        code = dflow(toy, *[words.get(word, word) for word in command.split()])
        said = "".join(capsys.readouterr())
        assert before == look(canary), command
        assert (1, True) == (code, f"{linked} is a symbolic link to {canary}; dflow writes" in said), command
        assert f"replace the link by its target, or move all of {toy.store} and link that" in said


def test_the_store_itself_may_be_a_link_and_what_mlflow_writes(toy, canary, tmp_path):
    kept = run(toy)
    shutil.move(toy.store, tmp_path / "large disk")
    toy.store.symlink_to(tmp_path / "large disk")
    (tmp_path / "large disk" / "mlartifacts").symlink_to(canary)
    (tmp_path / "large disk" / "mlflow.db").symlink_to(canary / OTHER)
    before = look(canary)
    assert 0 == dflow(toy, "doctor", "--verify")
    assert 0 == dflow(toy, "rm", kept.run, "--yes", "--trust")  # it was moved
    assert 0 == dflow(toy, "gc", "--delete", "--keep", "0")
    assert (set(), before) == (artifacts(toy), look(canary))


def test_a_new_store_whose_folder_is_a_link_is_refused_and_one_that_mlflow_has_linked_is_used(toy, canary):
    Store.open(toy.store, write=True)
    (toy.store / "mlartifacts").symlink_to(canary)
    Store.open(toy.store, write=True)
    for name in ("objects", "work"):
        other = toy.store.with_name(f"with {name}")
        other.mkdir()
        (other / name).symlink_to(canary)
        for write in (False, True):
            with pytest.raises(StoreError, match=f"{name} is a symbolic link to"):
                Store.open(other, write=write)


def test_a_store_that_is_a_link_to_nowhere_is_refused_by_name(toy, tmp_path):
    toy.store.symlink_to(tmp_path / "gone")
    with pytest.raises(StoreError, match="this link, or one above it, is broken; create its target folder"):
        Store.open(toy.store, write=True)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["format", "gc.lock", "mlflow.lock"])
def test_a_store_whose_own_file_is_a_link_is_refused(toy, canary, name):
    run(toy)
    (toy.store / name).unlink(missing_ok=True)
    (canary / name).write_text("2\n")
    (toy.store / name).symlink_to(canary / name)
    before = look(canary)
    with pytest.raises(StoreError, match=f"{name} is a symbolic link to"):
        Store.open(toy.store, write=True)
    assert before == look(canary)


def test_what_dflow_did_not_name_stays_in_a_store(toy):
    run(toy)
    folders = [toy.store / folder / name for folder in ("objects", "work") for name in STRANGE_NAMES]
    for folder in folders:
        shutil.copytree(toy.store / "index", folder)
    (toy.store / "index" / "notes").write_text(json.dumps({"digest": HASH, "run": RUN, "time": 1.0}) + "\n")
    (toy.store / "records" / "notes").mkdir()
    before = [look(folder) for folder in folders]
    assert 0 == dflow(toy, "gc", "--delete", "--keep", "0")
    assert 1 == dflow(toy, "rm", "notes", "--yes")
    assert before == [look(folder) for folder in folders]
    assert ["notes"] == [path.name for path in (toy.store / "index").iterdir()]
    assert set(STRANGE_NAMES) == artifacts(toy) == {path.name for path in (toy.store / "work").iterdir()}
    assert (toy.store / "records" / "notes").is_dir()


def test_links_in_a_store_go_and_what_they_lead_to_stays(toy, canary, tmp_path, capsys):
    kept = run(toy)
    failed = run(toy, "a.text=x", fail_at="d", contents="other")
    assert 0 == dflow(toy, "push", str(tmp_path / "shared"), kept.run)
    whole, altered, gone, extra = (kept.state.nodes[name].digest for name in "abcd")
    objects, work = toy.store / "objects", toy.store / "work"
    shutil.move(objects / whole, canary / "whole")  # what it leads to is whole, but no artifact of this store
    (objects / whole).symlink_to(canary / "whole")
    shutil.move(objects / altered / "sub", canary / "sub")
    (objects / altered / "sub").symlink_to(canary / "sub")
    (objects / extra / "more").symlink_to(canary)
    (objects / gone / MANIFEST).rename(canary / MANIFEST)
    (objects / gone / MANIFEST).symlink_to(canary / MANIFEST)
    for name, behind in ((HASH, canary), (f"{altered}.damaged", tmp_path / "nowhere"), (f".gone-{HASH}-1", toy.file)):
        (objects / name).symlink_to(behind)
    for name in (HASH, f"{HASH}.{'7' * 8}", f".{HASH}.{'8' * 32}", f".{RUN}"):
        (work / name).symlink_to(canary)
    (work / OTHER).symlink_to(tmp_path / "nowhere")
    unfinished = work / failed.state.nodes["d"].key
    for name in ("out-7-01234567", "altered", "results-1", "state/sub"):
        (unfinished / name).symlink_to(canary)
    (failed.folder / "figures").symlink_to(canary)
    (toy.store / "records" / RUN).symlink_to(canary)
    before = look(canary)
    assert [False] * 4 == [Store.open(toy.store, write=False).has(each) for each in (whole, altered, gone, HASH)]
    assert 1 == dflow(toy, "doctor", "--verify")
    said = capsys.readouterr().err
    for damage in (f"{whole[:12]}: its folder is a link", f"{altered[:12]}: sub/text.txt is a link"):
        assert damage in said
    assert f"{gone[:12]}: {MANIFEST} is a link" in said and f"{extra[:12]}: more does not belong there" in said
    assert 0 == dflow(toy, "pull", str(tmp_path / "shared"), str(toy.file))
    assert all(Store.open(toy.store, write=False).has(each) for each in (whole, altered, gone, extra))
    assert before == look(canary)
    assert 0 == dflow(toy, "rm", failed.run, "--yes")
    assert 0 == dflow(toy, "rm", RUN, "--yes")
    assert 0 == dflow(toy, "gc", "--delete", "--keep", "0", "--pulled")
    assert (set(), []) == (artifacts(toy), list(work.iterdir()))
    assert before == look(canary)


def test_a_run_writes_through_no_link(tmp_path, canary):
    """Real processes: an attempt that failed in the middle, whose folders and files links take the place of."""
    (tmp_path / "mine").mkdir()
    steps = '\n[node.d]\nop = "steps"\ntext = "@a"\n'
    toy = Toy(tmp_path / "mine", ONE_NODE + steps)
    assert 1 == toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode
    nodes = toy.state()["nodes"]
    made, unfinished = nodes["a"]["digest"], toy.store / "work" / nodes["d"]["key"]
    shutil.rmtree(toy.store / "objects" / made)
    (toy.store / "objects" / made).symlink_to(canary / "not there")
    (toy.store / "work" / nodes["a"]["key"]).symlink_to(canary / HASH)
    for name in ("lease", "ranks", "state/done.txt"):
        (canary / Path(name).name).write_text((unfinished / name).read_text())
        (unfinished / name).unlink()
        (unfinished / name).symlink_to(canary / Path(name).name)
    (unfinished / "state" / "inside").symlink_to("place")
    (toy.store / "index" / nodes["d"]["key"]).symlink_to(canary / OTHER)
    before = look(canary)
    ran = toy.dflow("run", str(toy.file))
    assert 0 == ran.returncode, ran.stderr
    assert before == look(canary)
    assert {"a": ("done", "miss"), "d": ("done", "resumed")} == toy.caches()
    assert ("hello", "5") == (toy.text("a"), toy.text("d"))
    assert [] == [path.name for path in toy.store.rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("name", ["figures", "events.jsonl", "d.log", "lock", ""])
def test_a_run_whose_record_holds_a_link_does_not_go_on(toy, canary, name):
    record = run(toy, fail_at="d")
    record.state.nodes["a"].cache = "miss"
    record.save_node("a")  # so that MLflow lacks it
    link = record.folder / name
    if link.exists():
        shutil.move(link, canary / "moved")
    else:
        (canary / "moved").mkdir()
    link.symlink_to(canary / "moved")
    before = look(canary)
    refused = f"{link} is a symbolic link to {canary / 'moved'}; .*replace the link by its target"
    for write in (
        lambda: Record.load(record.folder).lock(),
        lambda: Record.load(record.folder).lock(to_send=True),
        lambda: add_tag(record.folder, "best"),
        lambda: serving(toy.store, record.folder).__enter__(),
    ):
        with pytest.raises(StoreError, match=refused):
            write()
    assert [1, 1, 1] == [dflow(toy, *command) for command in (["resume"], ["sync", record.run], ["sync"])]
    assert before == look(canary)
    assert 0 == dflow(toy, "rm", record.run, "--yes")
    assert before == look(canary)


def test_a_file_of_dflow_is_made_in_the_place_of_a_link(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    for name, content in (("theirs", ""), ("nowhere", ""), (".", "")):
        (tmp_path / "own").symlink_to(tmp_path / name)
        os.close(open_own(tmp_path / "own", os.O_RDWR | os.O_CREAT))
        assert (False, content) == ((tmp_path / "own").is_symlink(), (tmp_path / "own").read_text())
        (tmp_path / "own").unlink()
        (tmp_path / "own").symlink_to(tmp_path / name)
        for text in (b"first, ", b"then"):
            with appended(tmp_path / "own") as file:
                file.write(text)
        assert (False, "first, then") == ((tmp_path / "own").is_symlink(), (tmp_path / "own").read_text())
        (tmp_path / "own").unlink()
        (tmp_path / "own").symlink_to(tmp_path / name)
        with new_file(tmp_path / "own") as file:
            file.write(b"mine")
        assert (False, "mine") == ((tmp_path / "own").is_symlink(), (tmp_path / "own").read_text())
        (tmp_path / "own").unlink()
    assert {"theirs": "theirs"} == {path.name: path.read_text() for path in tmp_path.iterdir()}
