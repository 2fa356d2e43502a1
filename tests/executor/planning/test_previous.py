"""With which earlier run a node that is not cached is compared."""

from imitated_runs import run, toy_pipeline

from dsl.read_toml import read_graph
from executor.planning.explanation import explain
from executor.planning.session import make_planner
from executor.store.artifact_store import Store


def test_after_an_experiment_the_reason_is_told_against_the_run_before_it(tmp_path):
    toy = toy_pipeline(tmp_path / "mine")
    first = run(toy, "c.between=one", "c.weight=1.5")
    run(toy, "c.between=two", "c.weight=2.5")
    planner = make_planner(Store.open(toy.store, write=False), read_graph(toy.file, ["c.between=one", "c.weight=3.5"]))
    assert planner.plan()["c"].reason == "config changed: c.weight from 1.5 to 3.5"
    (told, *_) = explain(planner.store, planner, "c")
    assert told.against == first.run
