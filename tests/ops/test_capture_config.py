"""What a capture's config may say of its backend, and what of it enters the key."""

from __future__ import annotations

import importlib.metadata

import pytest

from dsl.errors import ConfigError, PipelineError
from dsl.graph import compile_pipeline, graph_from_json, graph_to_json
from dsl.op import Ref
from dsl.pipeline import Pipeline
from dsl.read_toml import read_graph
from executor.content import ExternalDigests
from executor.keys import graph_parts
from ops.capture_targets.op import CaptureTargets
from ops.finetune_vlm.op import FinetuneVlm
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.tokenize_chat.op import TokenizeChat

PIPELINE = """
[pipeline]
name = "p"
[node.ingest]
op = "ingest"
source = "builtin:digits"
[node.images]
op = "inject_images"
samples = "@ingest"
[node.tokens]
op = "tokenize_chat"
samples = "@images"
[node.target]
op = "finetune_vlm"
tokens = "@tokens"
[node.capture]
op = "capture_targets"
tokens = "@tokens"
target = "@target"
backend = "sglang"
[node.capture.server_args]
"""
BACKEND = "ops.capture_targets.sglang:SglangBackend"


def config(**changes):
    return CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "'num_layers' must be >= 1: 0"),
        ({"num_layers": 3, "recipe": "eagle3"}, "eagle3 takes three layers, others by target_layer_ids"),
        ({"tp_degree": 2}, "'tp_degree' needs backend = \"sglang\""),
        ({"tp_degree": 0, "backend": "sglang"}, "'tp_degree' must be >= 1: 0"),
        ({"server_args": {"quantization": "fp8"}}, "'server_args' needs backend = \"sglang\""),
        ({"backend": "vllm"}, 'expected one of "huggingface", "sglang", got "vllm"'),
        ({"backend": "sglang", "server_args": {"a": [1]}}, "expected table of bool or int or float or str or none"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_when_the_config_is_made(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chunked_prefill_size", "a prompt cut into chunks would keep the states of its last chunk alone"),
        ("disable_radix_cache", "a prefix that is found in a cache are not computed"),
        ("cuda_graph_backend_prefill", "a recorded graph replays kernels without the code that keeps the states"),
        ("disable_overlap_schedule", "the states are read at once"),
        ("speculative_algorithm", "without a draft"),
        ("tp_size", "the node's own tp_degree says it"),
    ],
)
def test_server_arguments_that_would_spoil_the_states_are_refused_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=rf"{name} cannot be given: .*{reason}"):
        config(backend="sglang", server_args={name: True})


def graph_of(folder, lines):
    """The pipeline above with these server arguments."""
    file = folder / "pipeline.toml"
    file.write_text(PIPELINE.lstrip() + lines)
    return read_graph(file)


def key_parts(graph, folder):
    return graph_parts(graph, ExternalDigests(folder / "external.jsonl"))["capture"]


def test_all_refused_server_arguments_are_named_at_once_with_their_place_in_the_file(tmp_path):
    with pytest.raises(PipelineError) as caught:
        graph_of(tmp_path, "chunked_prefill_size = 512\npage_size = 16\npp_size = 2\n")
    (mistake,) = caught.value.mistakes
    assert ("node.capture.server_args", 20) == (mistake.path, mistake.position.line)
    assert "chunked_prefill_size cannot be given" in mistake.message
    assert "pp_size cannot be given" in mistake.message
    assert "page_size cannot" not in mistake.message


def test_a_server_argument_of_the_wrong_type_is_a_mistake(tmp_path):
    with pytest.raises(PipelineError, match="expected table of bool or int or float or str or none"):
        graph_of(tmp_path, "page_size = [16]\n")


def test_the_table_of_server_arguments_enters_the_key_without_order(tmp_path):
    one = graph_of(tmp_path, 'attention_backend = "triton"\npage_size = 16\n')
    other = graph_of(tmp_path, 'page_size = 16\nattention_backend = "triton"\n')
    third = graph_of(tmp_path, 'page_size = 1\nattention_backend = "triton"\n')
    keys = [key_parts(graph, tmp_path).key({}) for graph in (one, other, third)]
    assert keys[0] == keys[1] != keys[2]
    assert one == graph_from_json(graph_to_json(one))


def test_a_pipeline_in_python_with_server_arguments_is_the_twin_of_one_in_toml(tmp_path):
    p = Pipeline("p", root=tmp_path)
    samples = p.node("ingest", Ingest(source="builtin:digits"))
    images = p.node("images", InjectImages(samples=samples))
    tokens = p.node("tokens", TokenizeChat(samples=images))
    target = p.node("target", FinetuneVlm(tokens=tokens))
    p.node(
        "capture",
        CaptureTargets(tokens=tokens, target=target, backend="sglang", server_args={"mem_fraction_static": 0.5}),
    )
    assert graph_of(tmp_path, "mem_fraction_static = 0.5\n") == compile_pipeline(p)


def test_sglang_enters_the_key_only_where_it_captures(tmp_path, monkeypatch):
    file = tmp_path / "transformers.toml"
    file.write_text(PIPELINE.lstrip().split("backend =")[0])
    versions = {}
    for version in ("0.5.21", "0.5.22"):
        monkeypatch.setattr(importlib.metadata, "version", {"sglang": version}.get)
        for name, graph in (("huggingface", read_graph(file)), ("sglang", graph_of(tmp_path, ""))):
            versions.setdefault(name, []).append(key_parts(graph, tmp_path))
    alike, differing = versions["huggingface"], versions["sglang"]
    assert alike[0].key({}) == alike[1].key({})
    assert differing[0].key({}) != differing[1].key({})
    assert "sglang" not in alike[0].libraries
    assert (True, False) == (BACKEND in differing[0].code, BACKEND in alike[0].code)
    assert "ops.sglang_engine.runtime:SglangRuntime" in differing[0].code


def test_how_many_ranks_share_a_model_is_no_part_of_the_key(tmp_path):
    graph = graph_of(tmp_path, "")
    assert {"tp_degree", "batch_tokens"} == {
        name for name, field in graph.nodes["capture"].op.fields.items() if field.neutral
    }
    assert "tp_degree" not in key_parts(graph, tmp_path).config
