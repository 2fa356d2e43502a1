"""`evaluate` with an EAGLE-3 draft: its report, and what is refused before anything is decoded."""

from __future__ import annotations

import pytest
from eagle3_cases import V, eagle3_folder
from evaluate_cases import evaluate_config
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint

from dsl.errors import DataError, StopRequested
from dsl.op import Ref
from executor.tune.decision import Result
from executor.tune.rival import rival_of
from ops.artifacts import ImageSamples, Samples, TargetModel, TokenShards
from ops.check_export.op import unlike_serving
from ops.evaluate.conflicts import conflicts
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.evaluate.show import report as evaluate_sections
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.forecasts import ReportForecast, TargetForecast
from ops.lib.target.model import read_config
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.answers import Answer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_checkpoint("qwen3_vl", folder / "checkpoint", num_hidden_layers=4)
    stage = FakeStage(folder / "target")
    load_target(LoadTarget(checkpoint=str(folder / "checkpoint")), stage)
    target = stage.artifact(TargetModel)
    stage = FakeStage(folder / "ingest")
    ingest(Ingest(source="builtin:digits", max_samples=12, seed=0), stage)
    stage = FakeStage(folder / "inject", {"samples": stage.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("ingest")), stage)
    stage = FakeStage(folder / "tokenize", {"samples": stage.artifact(ImageSamples), "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target")), stage)
    return {"draft": None, "target": target, "tokens": stage.artifact(TokenShards)}


def evaluated(folder, inputs, eagle3, stop_after=None, **changes) -> FakeStage:
    stage = FakeStage(folder, inputs, stop_after=stop_after)
    evaluate(evaluate_config(draft=None, eagle3=str(eagle3), max_new_tokens=8, **changes), stage)
    return stage


def test_a_draft_is_measured_without_a_loss_stopped_or_not(tmp_path, inputs):
    eagle3 = eagle3_folder(tmp_path / "eagle3", tokens=range(1, V, 2), ids=(0, 1, 2))
    stage = evaluated(tmp_path / "whole", inputs, eagle3, block_sizes=(2,))
    report = read_json(stage.out_dir / "report.json")
    assert "eagle3" == report["eagle3"] and {"target", "tokens"} == set(report["inputs"])
    assert 0 == report["lossless"]["errors"]
    assert (4, 4) == (report["block_size"], report["block_size_trained"])
    assert {"2", "4"} == report["tau_by_block"].keys()
    assert "tau_random" not in report and "mtp" not in report
    with pytest.raises(StopRequested):
        evaluated(tmp_path / "stopped", inputs, eagle3, stop_after=1, block_sizes=(2,))
    again = evaluated(tmp_path / "stopped", inputs, eagle3, block_sizes=(2,))
    for name in ("report.json", "prompts.jsonl"):
        assert (stage.out_dir / name).read_bytes() == (again.out_dir / name).read_bytes()
    assert "the EAGLE-3 draft eagle3" in str(list(evaluate_sections(stage.out_dir)))
    beside = [Answer(row["id"], row["category"], 8, 4) for row in read_jsonl(stage.out_dir / "prompts.jsonl")]
    rival = rival_of(stage.out_dir, 7.0, Result(0, 100, 1.0, tuple(beside)))
    assert (report["tau"]["all"]["tau"], 4) == (rival.ranked.tau, rival.block_size)
    assert [report["tau"]["all"]["tau"]] == stage.metric("eval/tau")


def test_a_draft_of_another_target_is_refused_by_plan_and_run(tmp_path, inputs):
    checkpoint = inputs["target"].path / "model"
    target = TargetForecast.of(read_config(checkpoint), checkpoint)
    eagle3 = eagle3_folder(tmp_path / "eagle3")  # reads layers that the target does not have
    config = evaluate_config(draft=None, eagle3=str(eagle3))
    found = conflicts(config, {"draft": None, "target": target, "tokens": None})
    assert ["eagle3"] == list(found)
    assert "reads the layers 0, 2, 5: of a target of 4 layers, ascending ones from 0 to 2" in found["eagle3"]
    with pytest.raises(DataError, match="reads the layers 0, 2, 5"):
        evaluated(tmp_path / "run", inputs, eagle3)
    eagle3 = eagle3_folder(tmp_path / "other", architectures=["LlamaForCausalLM"])
    config = evaluate_config(draft=None, eagle3=str(eagle3))
    assert ["eagle3"] == list(conflicts(config, {"draft": None, "target": None, "tokens": None}))


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"draft": None}, "draft", 'key "draft" is missing'),
        ({"draft": Ref("draft"), "eagle3": "folder"}, "eagle3", "instead of a draft: leave one of them out"),
        ({"draft": None, "mtp": True, "eagle3": "folder"}, "eagle3", "instead of mtp: leave one of them out"),
    ],
)
def test_an_evaluation_has_one_of_a_draft_and_its_rivals(given, field, words):
    found = Evaluate.mistakes_with_nodes_above(given, lambda *_edges: {})
    assert [field] == list(found) and words in found[field]
    assert {} == Evaluate.mistakes_with_nodes_above({"draft": None, "eagle3": "folder"}, lambda *_edges: {})


def test_the_gate_takes_no_evaluation_of_an_eagle3_draft():
    report = {"max_new_tokens": 8, "dtype": "float32", "inputs": {}, "eagle3": "folder", "block_size": 4}
    assert ["eagle3 = folder"] == unlike_serving(ReportForecast.of(report).settings, 4)
