"""What a capture's config may say of its backend, and what of it enters the key."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from dsl.closure import Project
from dsl.compile import compile_pipeline
from dsl.errors import ConfigError, PipelineError
from dsl.graph import graph_from_json, graph_to_json
from dsl.op import Ref, op_of
from dsl.pipeline import Pipeline
from dsl.read_toml import read_graph
from executor.keys.node_key import Sources, graph_parts
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.server_args import ALLOWED
from ops.finetune_vlm.op import FinetuneVlm
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.lib.sglang.version import VERSIONS
from ops.tokenize_chat.op import TokenizeChat
from ops.train_dflash.op import TrainDflash

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
ROOT = Path(__file__).parents[3]


def config(**changes):
    return CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers: must be >= 1, got 0"),
        ({"num_layers": 3, "recipe": "eagle3"}, "eagle3 uses three layers, or those of target_layer_ids"),
        ({"num_layers": 2, "target_layer_ids": (1, 2)}, "'target_layer_ids' and num_layers: give only one of them"),
        ({"tp_degree": 2}, "'tp_degree' needs backend = \"sglang\""),
        ({"tp_degree": 0, "backend": "sglang"}, "tp_degree: must be >= 1, got 0"),
        ({"server_args": {"quantization": "fp8"}}, "'server_args' needs backend = \"sglang\""),
        ({"backend": "vllm"}, 'expected one of "huggingface", "sglang", got "vllm"'),
        ({"backend": "sglang", "server_args": {"a": [1]}}, "expected table of bool or int or float or str or none"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_when_the_config_is_made(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("tp_degree = 2", "tp_degree: 2 does not divide the 1 ranks of launch"),
        ('tp_degree = 2\nlaunch = { kind = "ranks", nproc = 3 }', "tp_degree: 2 does not divide the 3 ranks"),
        ('tp_degree = 2\nlaunch = { kind = "ranks", nproc = 4 }', None),
    ],
)
def test_ranks_that_make_no_whole_groups_are_refused_with_the_file(tmp_path, fields, message):
    file = tmp_path / "p.toml"
    file.write_text(PIPELINE.replace("[node.capture.server_args]", fields))
    if message is None:
        assert read_graph(file).nodes["capture"].config.tp_degree == 2
        return
    with pytest.raises(PipelineError) as error:
        read_graph(file)
    assert f": node.capture.{message}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chunked_prefill_size", "a prompt cut into chunks would keep only the states of its last chunk"),
        ("disable_radix_cache", "a cached prefix are not computed"),
        ("cuda_graph_backend_prefill", "a recorded graph replays kernels without the code that stores the states"),
        ("disable_overlap_schedule", "the states are read immediately"),
        ("speculative_algorithm", "without a draft"),
        ("tp_size", "set by the node's own tp_degree"),
        ("load_format", "weights other than the checkpoint's, or random ones"),
        ("lora_paths", "weights other than the checkpoint's, or random ones"),
        ("--chunked-prefill-size", "a prompt cut into chunks would keep only the states of its last chunk"),
    ],
)
def test_server_arguments_that_would_spoil_the_states_are_refused_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=rf"{name} is not allowed: .*{reason}"):
        config(backend="sglang", server_args={name: True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"atention_backend": "triton"}, r'not among the allowed ones, did you mean "attention_backend"\?: att'),
        ({"schedule_policy": "fcfs"}, "schedule_policy is not among the allowed ones.*: attention_backend, pre"),
        ({"mem-fraction-static": 0.5}, "write mem-fraction-static as mem_fraction_static"),
        ({"mem_fraction_static": "x"}, "mem_fraction_static: expected float, got 'x'"),
        ({"page_size": True}, "page_size: expected int, got True"),
        ({"page_size": 1.5}, "page_size: expected int, got 1.5"),
        ({"attention_backend": 1}, "attention_backend: expected str, got 1"),
        ({"disable_custom_all_reduce": 1}, "disable_custom_all_reduce: expected bool, got 1"),
        ({"moe_a2a_backend": "nixl"}, "moe_a2a_backend cannot be 'nixl': it opens ports to the whole network"),
        ({"moe_a2a_backend": "mooncake"}, "moe_a2a_backend cannot be 'mooncake': it opens ports to the whole network"),
    ],
)
def test_server_arguments_unknown_here_or_of_another_type_are_refused_when_the_config_is_made(given, message):
    with pytest.raises(ConfigError, match=message):
        config(backend="sglang", server_args=given)


def test_every_argument_that_may_be_given_is_taken_with_a_value_of_its_type():
    given = {name: kind("1") if kind is not bool else True for name, kind in ALLOWED.items()}
    assert given == config(backend="sglang", server_args=given).server_args
    assert {"mem_fraction_static": 1} == config(backend="sglang", server_args={"mem_fraction_static": 1}).server_args


def graph_of(folder, lines):
    """The pipeline above with these server arguments."""
    file = folder / "pipeline.toml"
    file.write_text(PIPELINE.lstrip() + lines)
    return read_graph(file)


def key_parts(graph, folder):
    return graph_parts(graph, Sources.now(folder / "external.jsonl"))["capture"]


def test_all_refused_server_arguments_are_named_at_once_with_their_place_in_the_file(tmp_path):
    with pytest.raises(PipelineError) as caught:
        graph_of(tmp_path, "chunked_prefill_size = 512\npage_size = 16\npp_size = 2\n")
    (mistake,) = caught.value.mistakes
    assert ("node.capture.server_args", 20) == (mistake.path, mistake.position.line)
    assert "chunked_prefill_size is not allowed" in mistake.what
    assert "pp_size is not allowed" in mistake.what
    assert "page_size cannot" not in mistake.what


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


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("ops/lib/sglang/version.py", 'VERSIONS = ("0.5.21"', 'VERSIONS = ("9.9.9"'),
        ("ops/lib/sglang/version.py", '"backend_version"', '"version"'),
        ("ops/lib/sglang/runtime.py", '"the sglang backend"', '"a backend"'),
        ("ops/lib/sglang/v0_5_21.py", "padded: array[int]", "ids: array[int]"),
        ("ops/lib/sglang/v0_5_23.py", "padded: array[int]", "ids: array[int]"),
        ("ops/capture_targets/sglang.py", '"the target\'s context"', '"its context"'),
    ],
)
def test_an_edit_of_sglangs_code_changes_the_code_of_its_own_captures_alone(tmp_path, file, old, new):
    def code(symbols, root):
        return Project([root]).closure(symbols).digests

    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    edited = tmp_path / file
    assert edited.read_text().count(old) == 1
    edited.write_text(edited.read_text().replace(old, new))
    capture, training = op_of(CaptureTargets).run, op_of(TrainDflash).run
    for symbols in ([capture, *config().chosen_code()], [training]):
        assert code(symbols, ROOT) == code(symbols, tmp_path)
    served = [capture, *config(backend="sglang").chosen_code()]
    before, after = code(served, ROOT), code(served, tmp_path)
    assert before.keys() == after.keys()
    assert [file] == [name for name in before if before[name] != after[name]]


def test_sglang_enters_the_key_only_where_it_captures(tmp_path, monkeypatch):
    file = tmp_path / "transformers.toml"
    file.write_text(PIPELINE.lstrip().split("backend =")[0])
    versions = {}
    for version in VERSIONS:
        monkeypatch.setattr(importlib.metadata, "version", {"sglang": version}.get)
        for name, graph in (("huggingface", read_graph(file)), ("sglang", graph_of(tmp_path, ""))):
            versions.setdefault(name, []).append(key_parts(graph, tmp_path))
    alike, differing = versions["huggingface"], versions["sglang"]
    assert alike[0].key({}) == alike[1].key({})
    assert differing[0].key({}) != differing[1].key({})
    assert "sglang" not in alike[0].libraries
    assert [] == [file for file in alike[0].code if "sglang" in file]
    own = {"ops/capture_targets/sglang.py", "ops/lib/sglang/version.py", "ops/lib/sglang/runtime.py"}
    assert own <= differing[0].code.keys()


def test_how_many_ranks_share_a_model_is_no_part_of_the_key(tmp_path):
    graph = graph_of(tmp_path, "")
    assert {"tp_degree", "batch_tokens"} == {
        name for name, field in graph.nodes["capture"].op.fields.items() if field.neutral
    }
    assert "tp_degree" not in key_parts(graph, tmp_path).config
