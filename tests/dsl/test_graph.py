"""Compiling: order, cycles, references, external paths, and the record of a graph."""

import json
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from dsl.compile import compile_pipeline
from dsl.errors import PipelineError
from dsl.graph import Graph, graph_from_json, graph_to_json
from dsl.op import Ref, field, op
from dsl.pipeline import Launch, Pipeline
from executor.keys.node_key import key_config
from ops.artifacts import ImageSamples, Samples
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.load_target.op import LoadTarget

CYCLE_HINT = " (remove one of these references)"


@op(version=1, run="nowhere:join")
@frozen(kw_only=True)
class Join:
    """Takes any number of nodes of its own kind."""

    first: Samples | None = None
    others: tuple[Samples, ...] = ()
    output = Samples


@op(version=1, run="nowhere:many_kinds")
@frozen(kw_only=True)
class ManyKinds:
    """Has a field of every kind."""

    rate: float = 1.0
    rates: tuple[float, ...] = ()
    table: dict[str, float] = field(default={})
    either: int | float = 1
    count: int = 1
    batch: int = field(default=8, neutral=True)
    source: str = field(default="builtin", external=True)
    model: str | None = field(default=None, external=True, model_id=True)
    edge: Samples | None = None
    output = Samples


def join(*parents: str) -> Join:
    if not parents:
        return Join()
    return Join(first=Ref(parents[0]), others=tuple(map(Ref, parents[1:])) or (Ref(parents[0]),))


def compiled(parents: dict[str, list[str]]) -> Graph:
    pipeline = Pipeline("p")
    for node_id, ids in parents.items():
        pipeline.nodes.update(_joined(node_id, ids).nodes)
    return compile_pipeline(pipeline)


def _joined(node_id: str, ids: list[str]) -> Pipeline:
    pipeline = Pipeline("p")
    pipeline.node(node_id, join(*ids) if ids else Ingest(source="builtin"))
    return pipeline


def mistakes(pipeline: Pipeline) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        compile_pipeline(pipeline)
    return str(caught.value).split("\n")


@st.composite
def acyclic(draw: st.DrawFn) -> dict[str, list[str]]:
    """Parents of up to 8 nodes, written in any order."""
    ids = [f"n{k}" for k in range(draw(st.integers(1, 8)))]
    parents = {
        node_id: draw(st.lists(st.sampled_from(ids[:k]), unique=True)) if k else [] for k, node_id in enumerate(ids)
    }
    return {node_id: parents[node_id] for node_id in draw(st.permutations(ids))}


@given(acyclic())
def test_the_order_is_the_first_written_node_whose_parents_are_done(parents: dict[str, list[str]]) -> None:
    expected: list[str] = []
    while len(expected) < len(parents):
        ready = [node for node, ids in parents.items() if node not in expected and set(ids) <= set(expected)]
        expected.append(ready[0])
    assert list(compiled(parents).nodes) == expected


@given(acyclic())
def test_below_is_everything_that_reads_from_a_node(parents: dict[str, list[str]]) -> None:
    graph = compiled(parents)
    for node_id in parents:
        expected = {node_id}
        for _ in parents:
            expected |= {child for child, ids in parents.items() if expected & set(ids)}
        assert graph.below(node_id) == expected


@given(acyclic(), st.data())
def test_up_to_is_the_nodes_and_everything_that_they_read(parents: dict[str, list[str]], data: st.DataObject) -> None:
    graph = compiled(parents)
    chosen = data.draw(st.lists(st.sampled_from(list(parents)), min_size=1, unique=True))
    expected = set(chosen)
    for _ in parents:
        expected |= {parent for node_id in expected for parent in parents[node_id]}
    part = graph.up_to(chosen)
    assert list(part.nodes) == [node_id for node_id in graph.nodes if node_id in expected]
    assert all(part.nodes[node_id] == graph.nodes[node_id] for node_id in expected)


def test_a_chain_of_10000_nodes_compiles_and_its_cycle_is_found() -> None:
    size = 10_000
    pipeline = Pipeline("long")
    pipeline.node("n0", Join())
    for k in range(1, size):
        pipeline.node(f"n{k}", Join(first=Ref(f"n{k - 1}")))
    graph = compile_pipeline(pipeline)
    assert list(graph.nodes) == [f"n{k}" for k in range(size)]
    assert len(graph.below("n1")) == size - 1

    closed = Pipeline("closed")
    for k in range(size):
        closed.node(f"n{k}", Join(first=Ref(f"n{(k - 1) % size}")))
    start, end = "n0 -> n1 -> n2 -> n3 -> n4 -> n5", "n9994 -> n9995 -> n9996 -> n9997 -> n9998 -> n9999 -> n0"
    path = f"{start} -> ... 9,988 more ... -> {end}"
    assert mistakes(closed) == [f"node.n0.first: the nodes form a cycle: {path}{CYCLE_HINT}"]


def test_every_strongly_connected_component_is_reported_with_a_shortest_cycle() -> None:
    pipeline = Pipeline("knots")
    pipeline.node("a", join("d"))
    pipeline.node("b", join("a", "e"))
    pipeline.node("c", join("b"))
    pipeline.node("d", join("c", "b"))
    pipeline.node("e", join("f"))
    pipeline.node("f", join("e"))
    pipeline.node("g", join("g"))
    assert mistakes(pipeline) == [
        f"node.a.first: the nodes form a cycle: a -> b -> d -> a{CYCLE_HINT}",
        f"node.e.first: the nodes form a cycle: e -> f -> e{CYCLE_HINT}",
        f"node.g.first: the nodes form a cycle: g -> g{CYCLE_HINT}",
    ]


def test_unknown_nodes_and_wrong_artifacts_are_all_reported() -> None:
    pipeline = Pipeline("p")
    pipeline.node("images", InjectImages(samples=Ref("sampels")))
    pipeline.node("samples", Ingest(source="builtin"))
    pipeline.node("both", Join(first=Ref("images"), others=(Ref("samples"), Ref("nothing"))))
    assert mistakes(pipeline) == [
        'node.images.samples: there is no node "sampels" (did you mean "samples"?)',
        'node.both.first: expected Samples, but node "images" produces ImageSamples (Samples: "@samples", "@both")',
        'node.both.others: there is no node "nothing" (Samples: "@samples", "@both")',
    ]


def test_a_subclass_of_the_artifact_fits_an_edge() -> None:
    @frozen
    class CleanSamples(Samples):
        """Samples, cleaned."""

    @op(version=1, run="nowhere:clean")
    @frozen(kw_only=True)
    class Clean:
        """Cleans."""

        output = CleanSamples

    pipeline = Pipeline("p")
    pipeline.node("inject", InjectImages(samples=pipeline.node("clean", Clean())))
    assert compile_pipeline(pipeline).nodes["inject"].op.output == ImageSamples


def test_owner_and_name_are_a_path_where_there_is_a_folder_owner(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    pipeline = Pipeline("p", root=tmp_path)
    pipeline.node("target", LoadTarget(checkpoint="models/none"))
    with pytest.raises(PipelineError) as error:
        compile_pipeline(pipeline)
    assert f"there is no file or folder {tmp_path}/models/none" in str(error.value)


def test_external_paths_become_absolute_and_builtin_values_and_model_ids_stay(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    (tmp_path / "local" / "model").mkdir(parents=True)
    pipeline = Pipeline("p", root=tmp_path)
    pipeline.node("relative", Ingest(source="data/../data/a.jsonl"))
    pipeline.node("absolute", Ingest(source=f"{tmp_path}/data/a.jsonl"))
    pipeline.node("builtin", Ingest(source="builtin:digits"))
    pipeline.node("model_id", LoadTarget(checkpoint="Qwen/Qwen3-VL-2B", revision="0a" * 20))
    pipeline.node("folder", LoadTarget(checkpoint="local/model"))
    nodes = compile_pipeline(pipeline).nodes
    assert [nodes[node].config.source for node in ("relative", "absolute", "builtin")] == [
        f"{tmp_path}/data/a.jsonl",
        f"{tmp_path}/data/a.jsonl",
        "builtin:digits",
    ]
    assert nodes["model_id"].config.checkpoint == "Qwen/Qwen3-VL-2B"
    assert nodes["folder"].config.checkpoint == f"{tmp_path}/local/model"


@pytest.mark.parametrize(
    ("revision", "told"),
    [
        (None, "none is given"),
        ("main", '"main" may change without changing the key'),
        ("0A" * 20, f'"{"0A" * 20}" may change without changing the key'),
        ("0a" * 19, f'"{"0a" * 19}" may change without changing the key'),
    ],
)
def test_a_model_id_without_its_commit_is_refused(tmp_path: Path, revision: str | None, told: str) -> None:
    pipeline = Pipeline("p", root=tmp_path)
    pipeline.node("target", LoadTarget(checkpoint="owner/name", revision=revision))
    with pytest.raises(PipelineError) as error:
        compile_pipeline(pipeline)
    where = "checkpoint" if revision is None else "revision"
    assert str(error.value) == (
        f'node.target.{where}: the model id "owner/name" needs a commit as revision, 40 hex digits: {told} '
        "(find it on the model's page under Files and versions, or give the directory of a checkpoint)"
    )


def test_a_model_id_enters_the_key_with_its_commit_and_a_folder_needs_none(tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    folder, model = Pipeline("p", root=tmp_path), Pipeline("p", root=tmp_path / "owner")
    folder.node("target", LoadTarget(checkpoint="owner/name"))
    model.node("target", LoadTarget(checkpoint="owner/name", revision="0a" * 20))
    configs = [key_config(compile_pipeline(pipeline).nodes["target"]) for pipeline in (folder, model)]
    assert [config.get("checkpoint") for config in configs] == [None, "owner/name"]
    assert [config["revision"] for config in configs] == [None, "0a" * 20]


def test_a_recorded_graph_is_equal_when_it_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    pipeline = Pipeline("p", seed=3, tracking_uri="http://localhost:1", root=tmp_path)
    samples = pipeline.node("ingest", Ingest(source="a.jsonl", val_fraction=0.25), launch=Launch(threads=2))
    pipeline.node("inject", InjectImages(samples=samples, max_dropped=4))
    graph = compile_pipeline(pipeline)
    (tmp_path / "a.jsonl").unlink()
    text = json.dumps(graph_to_json(graph))
    again = graph_from_json(json.loads(text))
    assert again == graph
    assert list(again.nodes) == list(graph.nodes)
    assert graph_to_json(graph)["nodes"][1]["config"]["samples"] == "@ingest"


def test_an_edge_that_is_not_given_survives_an_override() -> None:
    @op(version=1, run="nowhere:seeded")
    @frozen(kw_only=True)
    class Seeded:
        """Its seed makes the pipeline copy the config."""

        seed: int | None = None
        others: tuple[Samples, ...] = ()
        output = Samples

    pipeline = Pipeline("p", seed=3)
    pipeline.node("seeded", Seeded())
    assert compile_pipeline(pipeline, ["seeded.seed=4"]).nodes["seeded"].config == Seeded(seed=4)


def test_a_record_that_does_not_fit_is_refused() -> None:
    pipeline = Pipeline("p")
    pipeline.node("ingest", Ingest(source="builtin"))
    record = graph_to_json(compile_pipeline(pipeline))
    with pytest.raises(PipelineError) as caught:
        graph_from_json({**record, "format": 3})
    assert str(caught.value) == (
        "the recorded graph has format 3, this version of dflow reads 2"
        " (use the version of dflow that wrote it, or start a new run)"
    )
    with pytest.raises(PipelineError) as caught:
        graph_from_json({**record, "more": 1})
    assert str(caught.value) == (
        "the recorded graph cannot be read: more: unknown key"
        " (use the version of dflow that wrote it, or start a new run)"
    )
    record["nodes"][0]["config"]["val_fraction"] = "x"
    with pytest.raises(PipelineError) as caught:
        graph_from_json(record)
    assert str(caught.value) == (
        "node.ingest: the recorded config does not fit the op ingest as it is now: "
        'ingest.val_fraction: expected float, got "x"'
    )


def test_the_config_in_the_key_has_no_neutral_fields_no_edges_and_no_paths(tmp_path: Path) -> None:
    pipeline = Pipeline("p", root=tmp_path)
    samples = pipeline.node("ingest", Ingest(source="builtin"))
    pipeline.node("kinds", ManyKinds(edge=samples, source=".", model="owner/name", batch=9))
    assert key_config(compile_pipeline(pipeline).nodes["kinds"]) == {
        "rate": 1.0,
        "rates": (),
        "table": {},
        "either": 1,
        "count": 1,
        "model": "owner/name",
    }


def test_an_int_in_a_float_field_is_the_same_key_as_the_float() -> None:
    pipeline = Pipeline("p")
    pipeline.node("kinds", ManyKinds(rate=1, rates=(1, 2.0), table={"a": 3}, either=1, count=1))
    config = key_config(compile_pipeline(pipeline).nodes["kinds"])
    assert [repr(config[name]) for name in ("rate", "rates", "table", "either", "count")] == [
        "1.0",
        "(1.0, 2.0)",
        "{'a': 3.0}",
        "1",
        "1",
    ]
