"""The pipeline files that users run, and the twin in Python."""

from pathlib import Path

from dsl.graph import graph_to_json
from dsl.pipeline import Launch
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, graph_parts

PIPELINES = Path(__file__).parents[2] / "pipelines"


def test_the_toml_pipeline_and_its_python_twin_compile_to_the_same_graph_and_keys(tmp_path: Path) -> None:
    toml = read_graph(PIPELINES / "vlm_dflash.toml")
    python = read_graph(PIPELINES / "vlm_dflash.py")
    assert python == toml
    assert list(python.nodes) == list(toml.nodes)
    assert graph_to_json(python) == graph_to_json(toml)
    assert ("eval", "check") == toml.result_nodes
    sources = Sources.now(tmp_path / "external.jsonl")
    assert graph_parts(python, sources) == graph_parts(toml, sources)


def test_the_pipeline_under_sequence_parallelism_differs_by_the_launch_of_its_training_and_shares_all_keys(
    tmp_path: Path,
) -> None:
    alone = read_graph(PIPELINES / "vlm_dflash.toml")
    shared = read_graph(PIPELINES / "vlm_dflash_sp.toml")
    sources = Sources.now(tmp_path / "external.jsonl")
    assert graph_parts(alone, sources) == graph_parts(shared, sources)
    launches = {node_id: node.launch for node_id, node in shared.nodes.items() if node.launch != Launch()}
    assert {"train": Launch(kind="ranks", nproc=2, sp_degree=2)} == launches
