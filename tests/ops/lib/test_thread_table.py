"""The table of CPU threads: few for small targets, fixed by what a node reads; and who it holds for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsl.estimate import useful_threads
from dsl.graph import GraphNode
from dsl.launch import Launch
from dsl.op import Ref, op_of
from dsl.op_class import hook
from dsl.op_table import all_ops
from ops.capture_targets.op import CaptureTargets
from ops.evaluate.op import Evaluate
from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.target.sizes import TargetSizes
from ops.lib.target.tiny_config import tiny_config
from ops.load_target.op import LoadTarget
from ops.regenerate_answers.op import RegenerateAnswers
from ops.train_dflash.op import TrainDflash

TOKENS = {"vocab_size": 2048, "merge_size": 2, "pad_token_id": 0, "eos_token_ids": [1]}
REMOTE = {"processor": "owner/m", "revision": "0" * 40}
WITH_TARGET = ["finetune_vlm", "regenerate_answers", "capture_targets", "train_dflash", "export_draft", "evaluate"]


def node(config: object, **inputs: str) -> GraphNode:
    by_edge = {edge: (parent,) for edge, parent in inputs.items()}
    return GraphNode("n", config, op_of(config), Launch(), by_edge)


def target(folder: Path, layers: int) -> Path:
    """Write a target artifact's description with this many text layers of 0.2 million parameters each."""
    config = tiny_config(TOKENS, {})
    config["text_config"]["num_hidden_layers"] = layers
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("layers", "millions", "batches", "drafting", "decoding"),
    [
        (8, 3.10, 2, 1, 1), (17, 4.88, 2, 1, 1), (18, 5.07, None, None, 1), (43, 10.00, None, None, 1),
        (44, 10.19, None, None, None),
    ],
)  # fmt: skip
def test_a_target_gets_its_threads_by_its_parameters(
    layers: int, millions: float, batches: int | None, drafting: int | None, decoding: int | None, tmp_path: Path
) -> None:
    made = {"target": target(tmp_path, layers)}
    sizes = TargetSizes.of(json.loads((tmp_path / "model" / "config.json").read_text()))
    assert millions == pytest.approx(sizes.parameters / 1e6, abs=0.005)
    capture = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), num_layers=5)
    evaluate = Evaluate(draft=Ref("draft"), target=Ref("target"), tokens=Ref("tokens"))
    train = TrainDflash(batches=Ref("batches"), target=Ref("target"), features=Ref("features"))
    assert batches == useful_threads(node(capture, target="target"), made)
    assert drafting == useful_threads(node(train, target="target"), made)
    assert decoding == useful_threads(node(evaluate, target="target"), made)


def test_the_built_in_target_is_trained_by_two_threads_and_a_checkpoint_by_its_own_size(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "tokens.json").write_text(json.dumps(TOKENS))
    checkpoints = {layers: target(tmp_path / str(layers), layers) / "model" for layers in (17, 18)}
    starts = ["builtin:tiny-qwen3-vl", str(checkpoints[17]), str(checkpoints[18])]
    found = [
        useful_threads(
            node(FinetuneVlm(tokens=Ref("tokens"), init=start, steps=1), tokens="tokens"), {"tokens": tokens}
        )
        for start in starts
    ]
    assert [2, 2, None] == found


def test_a_model_id_gets_all_threads_whether_or_not_it_is_here_already(tmp_path: Path) -> None:
    config = FinetuneVlm(tokens=Ref("tokens"), init="owner/tiny", revision="0" * 40, steps=1)
    assert useful_threads(node(config, tokens="tokens"), {"tokens": tmp_path}) is None


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", '{"hidden_size": 8}', '{"hidden_size": 8, "vocab_size": null}', '{"text_config": [8]}'),
        '{"hidden_size": "8", "vocab_size": {}}',
    ],
)
def test_a_config_that_tells_no_size_is_left_to_the_stage(content: str, tmp_path: Path) -> None:
    config = target(tmp_path, 8) / "model" / "config.json"
    config.write_text(content)
    capture = CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), num_layers=5)
    assert useful_threads(node(capture, target="target"), {"target": tmp_path}) is None
    config.unlink()
    assert useful_threads(node(capture, target="target"), {"target": tmp_path}) is None


def test_without_a_target_or_a_table_an_op_gets_all_threads(tmp_path: Path) -> None:
    regenerate = RegenerateAnswers(
        samples=Ref("samples"), backend="endpoint", endpoint="http://localhost:1/v1", model="m", **REMOTE
    )
    assert useful_threads(node(regenerate, samples="samples"), {"samples": tmp_path}) is None
    assert useful_threads(node(LoadTarget(checkpoint="owner/m", revision=REMOTE["revision"])), {}) is None


def test_every_op_that_computes_with_a_target_has_a_row() -> None:
    assert [*WITH_TARGET, "check_export"] == [name for name, spec in all_ops().items() if hook(spec, "threads")]
