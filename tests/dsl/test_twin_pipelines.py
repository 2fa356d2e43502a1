"""The pipeline file that users run, and its twin in Python."""

from pathlib import Path

from dsl.graph import graph_to_json
from dsl.read_toml import read_graph
from executor.content import ExternalDigests
from executor.keys import graph_parts

PIPELINES = Path(__file__).parents[2] / "pipelines"


def test_the_toml_pipeline_and_its_python_twin_compile_to_the_same_graph_and_keys(tmp_path: Path) -> None:
    toml = read_graph(PIPELINES / "vlm_dflash.toml")
    python = read_graph(PIPELINES / "vlm_dflash.py")
    assert python == toml
    assert list(python.nodes) == list(toml.nodes)
    assert graph_to_json(python) == graph_to_json(toml)
    externals = ExternalDigests(tmp_path / "external.jsonl")
    assert graph_parts(python, externals) == graph_parts(toml, externals)
