"""`-s node.field=value`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsl.compile import compile_pipeline, override_graph
from dsl.errors import ConfigError, PipelineError
from dsl.graph import Graph, graph_from_json, graph_to_json
from dsl.launch import memory_bytes
from dsl.pipeline import Launch, Pipeline
from dsl.read_toml import read_graph
from ops.capture_targets.op import CaptureTargets
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.load_target.op import LoadTarget
from ops.tokenize_chat.op import TokenizeChat


def example(root: Path) -> Pipeline:
    pipeline = Pipeline("p", seed=5, experiment="e", tracking_uri="u", root=root)
    samples = pipeline.node("ingest", Ingest(source="builtin:digits", max_samples=3))
    tokens = pipeline.node("tokenize", TokenizeChat(samples=pipeline.node("inject", InjectImages(samples=samples))))
    target = pipeline.node("target", LoadTarget(checkpoint="owner/name", revision="0a" * 20, embed_key="e"))
    pipeline.node("capture", CaptureTargets(tokens=tokens, target=target))
    return pipeline


def changed(root: Path, *overrides: str) -> Graph:
    return compile_pipeline(example(root), overrides)


def mistakes(root: Path, *overrides: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        changed(root, *overrides)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("ingest.max_samples=4", 4),
        ("ingest.max_samples = 4 ", 4),
        ("ingest.max_samples=none", None),
        ("ingest.val_fraction=1e-2", 0.01),
        ("ingest.val_fraction=0", 0),
        ("ingest.seed=none", 5),
        ("target.embed_key=none", None),
        ("target.embed_key='none'", "none"),
        ("target.embed_key=v1.2", "v1.2"),
        ("target.embed_key=a=b", "a=b"),
        ("target.checkpoint=none/none", "none/none"),
        ("capture.dtype=bfloat16", "bfloat16"),
        ('capture.splits=["val"]', ("val",)),
        ("capture.target_layer_ids=[1, 2]", (1, 2)),
    ],
)
def test_a_value_is_read_as_toml_or_as_a_bare_word(tmp_path: Path, override: str, expected: object) -> None:
    node_id, field = override.partition("=")[0].strip().split(".")
    assert getattr(changed(tmp_path, override).nodes[node_id].config, field) == expected


def test_nothing_else_changes(tmp_path: Path) -> None:
    assert changed(tmp_path) == compile_pipeline(example(tmp_path))
    graph = compile_pipeline(example(tmp_path), ["capture.num_layers=4"])
    expected = graph_to_json(compile_pipeline(example(tmp_path)))
    expected["nodes"][-1]["config"]["num_layers"] = 4
    assert graph_to_json(graph) == expected


def test_an_edge_can_be_moved(tmp_path: Path) -> None:
    pipeline = example(tmp_path)
    pipeline.node("more", Ingest(source="builtin:digits"))
    graph = compile_pipeline(pipeline, ["inject.samples=@more"])
    assert graph.nodes["inject"].inputs == {"samples": ("more",)}


def test_the_launch_can_be_changed_by_field_and_as_a_whole(tmp_path: Path) -> None:
    graph = changed(tmp_path, "target.launch.device=cpu", "target.launch.threads=2", "ingest.launch={ threads = 3 }")
    assert graph.nodes["target"].launch == Launch(device="cpu", threads=2)
    assert graph.nodes["ingest"].launch == Launch(threads=3)


def test_all_mistakes_are_reported_together_as_strictly_as_in_a_file(tmp_path: Path) -> None:
    overrides = [
        "ingest",
        "ingst.seed=1",
        "ingest.op=evaluate",
        "ingest.sead=1",
        "ingest.val_fraction=2",
        "ingest.max_samples=3.0",
        "target.embed_key=1",
        "target.launch.nprocs=1",
        "capture.dtype=fp32",
        "tokenize.vocab_size=big",
    ]
    assert mistakes(tmp_path, *overrides) == [
        "-s ingest: expected node.field=value",
        "-s ingest.op=evaluate: -s changes a node's values, not its op (change the op in the file)",
        '-s ingst.seed=1: there is no node "ingst" (did you mean "ingest"?)',
        "-s ingest.max_samples=3.0: expected int or none, got 3.0 (float)",
        '-s ingest.sead=1: unknown key (did you mean "seed"?)',
        "-s ingest.val_fraction=2: must be < 1, got 2.0",
        '-s tokenize.vocab_size=big: expected int, got "big"',
        "-s target.embed_key=1: expected str or none, got 1 (int)",
        '-s target.launch.nprocs=1: unknown key (did you mean "nproc"?)',
        '-s capture.dtype=fp32: expected one of "float32", "bfloat16", "float16", got "fp32"',
    ]


def test_a_mistake_in_the_wiring_names_the_override(tmp_path: Path) -> None:
    assert mistakes(tmp_path, "inject.samples=@target", "ingest.source=a.jsonl") == [
        f"-s ingest.source=a.jsonl: there is no file or folder {tmp_path}/a.jsonl",
        '-s inject.samples=@target: expected Samples, but node "target" produces TargetModel (Samples: "@ingest")',
    ]


def test_mistakes_of_the_file_come_before_those_of_the_overrides(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        '[pipeline]\nname = "p"\n[node.a]\nop = "ingest"\nsource = "builtin"\nsede = 1\nmax_samples = "x"\n'
    )
    with pytest.raises(PipelineError) as caught:
        read_graph(file, ["a.max_samples=0", "a.max_dropped=-1"])
    assert str(caught.value).split("\n") == [
        f'{file}:6:1: node.a.sede: unknown key (did you mean "seed"?)',
        "-s a.max_samples=0: must be >= 1, got 0",
        "-s a.max_dropped=-1: must be >= 0, got -1",
    ]


def test_an_override_can_give_what_the_file_lacks(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[pipeline]\nname = "p"\n[node.a]\nop = "ingest"\n')
    assert read_graph(file, ["a.source=builtin:digits"]).nodes["a"].config == Ingest(source="builtin:digits", seed=0)


def test_a_recorded_graph_takes_overrides_with_the_same_checks(tmp_path: Path) -> None:
    recorded = graph_from_json(json.loads(json.dumps(graph_to_json(compile_pipeline(example(tmp_path))))))
    assert override_graph(recorded, []) == recorded
    assert override_graph(recorded, ["capture.num_layers=4"]) == changed(tmp_path, "capture.num_layers=4")
    with pytest.raises(PipelineError) as caught:
        override_graph(recorded, ["capture.num_layers=0"])
    assert str(caught.value) == "-s capture.num_layers=0: must be >= 1, got 0"


LAYERS_FILE = """\
[pipeline]
name = "p"
[node.ingest]
op = "ingest"
source = "builtin:digits"
[node.inject]
op = "inject_images"
samples = "@ingest"
[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
[node.target]
op = "load_target"
checkpoint = "owner/name"
revision = "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"
[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
num_layers = 3
"""
ONE_OF_THEM = "'target_layer_ids' and num_layers: give only one of them"


def test_an_argument_that_excludes_a_field_of_the_file_names_how_to_unset_that(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(LAYERS_FILE)

    def refused(*overrides: str, sweeps: Sequence[str] = ()) -> str:
        with pytest.raises(PipelineError) as caught:
            read_graph(file, overrides, sweeps)
        return str(caught.value)

    layers, unset = "capture.target_layer_ids=[1,3,5]", "capture.num_layers=none"
    remedy = f"{file}:20:1 sets num_layers; unset with -s {unset}"
    assert refused(layers) == f"-s {layers}: {ONE_OF_THEM} ({remedy})"
    swept = "capture.target_layer_ids=[[1], [2]]"
    assert refused(sweeps=[swept]) == f"--sweep {swept}: {ONE_OF_THEM} ({remedy})"
    assert refused("capture.recipe=eagle3").endswith(f" ({remedy})")
    assert refused(layers, "capture.num_layers=2") == f"-s {layers}: {ONE_OF_THEM}"
    assert read_graph(file, [layers, unset]).nodes["capture"].config.target_layer_ids == (1, 3, 5)
    file.write_text(LAYERS_FILE.replace("num_layers = 3", "target_layer_ids = [1, 3]"))
    assert refused("capture.num_layers=2") == (
        f"{file}:20:1: node.capture.target_layer_ids: {ONE_OF_THEM} "
        f"({file}:20:1 sets target_layer_ids; unset with -s capture.target_layer_ids=none)"
    )
    assert (
        read_graph(file, ["capture.num_layers=2", "capture.target_layer_ids=none"]).nodes["capture"].config.layer_count
        == 2
    )


TABLE_OPS = """
from attrs import frozen
from dsl.op import field, op, seed_field
from ops.artifacts import Samples

@op(version=1, run="table_ops:measure")
@frozen(kw_only=True)
class Measure:
    samples: Samples | None = None
    lr: float = 0.5
    most: int | None = 3
    weights: dict[str, float] = field(default={"a": 1.0})
    headers: dict[str, str] = field(default={})
    layers: tuple[int, ...] = (1,)
    needed: int
    seed: int | None = seed_field()
    output = Samples
"""
TABLE_FILE = """\
[pipeline]
name = "p"
ops = ["table_ops.py"]
[mlflow]
tags = { team = "a", stage = "b" }
notes = "n"
[machine]
cpus = 2
[node.n]
op = "measure"
needed = 1
lr = 0.1
most = 5
headers = { accept = "x" }
launch = { threads = 2 }
"""


def read(folder: Path, *overrides: str) -> Graph:
    (folder / "table_ops.py").write_text(TABLE_OPS)
    (folder / "p.toml").write_text(TABLE_FILE)
    return read_graph(folder / "p.toml", overrides)


def refused(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read(folder, *overrides)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("n.lr=none", 0.5),
        ("n.most=none", None),
        ("n.layers=[1, 2]", (1, 2)),
        ("n.layers=[]", ()),
        ("n.layers=none", (1,)),
        ("n.weights.b=2", {"a": 1.0, "b": 2}),
        ("n.weights.a=none", {}),
        ("n.weights={ c = 3 }", {"c": 3}),
        ("n.headers.accept=text/html", {"accept": "text/html"}),
        ("n.headers.x.y=z", {"accept": "x", "x.y": "z"}),
        ("n.headers.accept=none", {}),
        ("n.headers.accept='none'", {"accept": "none"}),
    ],
)
def test_lists_and_tables_take_values_and_none_resets(tmp_path: Path, override: str, expected: object) -> None:
    assert getattr(read(tmp_path, override).nodes["n"].config, override.split(".")[1].split("=")[0]) == expected


def test_the_launch_is_reset_as_a_whole_and_by_field(tmp_path: Path) -> None:
    assert read(tmp_path, "n.launch=none").nodes["n"].launch == Launch()
    assert read(tmp_path, "n.launch.threads=none", "n.launch.cpus=1").nodes["n"].launch == Launch(cpus=1)


def test_the_other_tables_take_overrides(tmp_path: Path) -> None:
    graph = read(
        tmp_path,
        "pipeline.seed=4",
        "pipeline.name=q",
        "mlflow.tags.team=c",
        "mlflow.tags.stage=none",
        "machine.cpus=none",
    )
    assert (graph.seed, graph.name, graph.experiment, graph.nodes["n"].config.seed) == (4, "q", "q", 4)
    assert (graph.tags, graph.machine.cpus) == ({"team": "c"}, None)
    graph = read(tmp_path, "mlflow.experiment=e", "mlflow.notes=none", "machine.memory=2 GB", "mlflow.tags={}")
    assert (graph.experiment, graph.notes, memory_bytes(graph.machine), graph.tags) == ("e", "", 2 * 10**9, {})


def test_the_seed_of_a_python_pipeline_reaches_the_nodes_that_gave_none(tmp_path: Path) -> None:
    pipeline = Pipeline("p", seed=1, root=tmp_path)
    pipeline.node("own", Ingest(source="builtin", seed=1))
    pipeline.node("none", Ingest(source="builtin"))
    nodes = compile_pipeline(pipeline, ["pipeline.seed=2"]).nodes
    assert {node_id: node.config.seed for node_id, node in nodes.items()} == {"own": 1, "none": 2}
    with pytest.raises(PipelineError) as caught:
        override_graph(compile_pipeline(pipeline), ["pipeline.seed=2"])
    assert str(caught.value) == (
        "-s pipeline.seed=2: the nodes of a recorded run hold their seeds already (give a node its own: -s NODE.seed=1)"
    )


def test_every_mistake_is_shown_at_its_argument(tmp_path: Path) -> None:
    overrides = {
        "n.lr.x=1": "n.lr: expected float, got { x = 1 } (table)",
        "n.samples.x=1": 'n.samples: expected a reference to Samples ("@node"), got { x = 1 } (table)',
        "n.lrr.x=1": 'n.lrr: unknown key (did you mean "lr"?)',
        "n.weights.b=x": 'n.weights: b: expected float, got "x"',
        "n.layers=[1, 2": "not TOML: Unclosed array; text in a list needs quotes, as in TOML",
        "n.layers=[1, x]": "not TOML: Invalid value; text in a list needs quotes, as in TOML",
        "n.needed=none": 'expected int, got "none"',
        "n.launch=2": "expected a table (launch = { nproc = 2 })",
        "n.launch={nproc=0}": "n.launch.nproc: must be >= 1, got 0",
        "pipeline.ops=[]": "-s cannot change pipeline.ops (change it in the file)",
        "pipeline.seeds=1": 'unknown key (did you mean "seed"?)',
        "mlflow.tags.dflow.x=1": "mlflow.tags: dflow.x: expected str, got 1 (int)",
        "machine.cpus=0": "must be >= 1, got 0",
        "machin.cpus=1": 'there is no node "machin" (did you mean "machine"?)',
        "zzz.lr=1": 'there is no node "zzz" (nodes: n; tables: pipeline, mlflow, machine)',
        "n.=1": "expected node.field=value",
        "=1": "expected node.field=value",
    }
    told = {override: refused(tmp_path, override) for override in overrides}
    assert told == {override: [f"-s {override}: {expected}"] for override, expected in overrides.items()}


def test_a_node_must_not_be_called_like_a_table() -> None:
    with pytest.raises(ConfigError, match="that is the table"):
        Pipeline("p").node("pipeline", Ingest(source="builtin"))
