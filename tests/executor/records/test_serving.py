"""What is being served is in use."""

import os
from types import SimpleNamespace

import pytest
from imitated_runs import run, toy_pipeline

from dsl.errors import StoreError
from executor.maintenance.gc import collect, remove_run, survey
from executor.model_tools.serve import ServeOptions, serve_run
from executor.records.run_record import find_record, is_served, serving
from executor.store.artifact_store import Store


@pytest.fixture
def toy(tmp_path):
    toy = toy_pipeline(tmp_path)
    run(toy)
    return toy


def test_gc_keeps_a_run_while_it_is_served_and_no_longer(toy):
    store = Store.open(toy.store, write=True)
    record = find_record(store.records, None)
    with serving(store.path, record.folder):
        assert () == collect(store, keep=0).goes
        assert ["it is being served"] == [kept.why for kept in survey(store, keep=0).kept]
        with pytest.raises(StoreError, match="is being served; stop that first"):
            remove_run(store, record.folder)
    assert {"artifact"} == {item.kind for item in survey(store, keep=0).goes}
    remove_run(store, record.folder)


def test_what_a_killed_server_left_keeps_nothing(toy):
    store = Store.open(toy.store, write=True)
    record = find_record(store.records, None)
    (record.folder / f"serving-{os.getpid()}").touch()
    assert not is_served(record.folder)


def test_the_command_serves_under_that_lock(toy, monkeypatch):
    record = find_record(toy.store / "records", None)
    seen = []
    monkeypatch.setattr("executor.model_tools.serve.find_served", lambda *_: SimpleNamespace(best_blocks={}))
    monkeypatch.setattr("executor.model_tools.serve._serve", lambda *_: seen.append(is_served(record.folder)))
    serve_run(
        ServeOptions(store=toy.store, run=None, node=None, engine="sglang", host="h", port=1, check=True, extra=[])
    )
    assert [True] == seen
    assert [] == list(record.folder.glob("serving-*"))
