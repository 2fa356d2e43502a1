"""`evaluate` with the target's own MTP head: its report, and what is refused before anything is decoded."""

from __future__ import annotations

import shutil

import attrs
import pytest
from evaluate_cases import evaluate_config
from fake_stage import FakeStage
from mtp_cases import mtp_checkpoint
from safetensors.torch import load_file, save_file

from dsl.compile import compile_pipeline
from dsl.errors import DataError, PipelineError, StopRequested
from dsl.op import Ref
from dsl.pipeline import Pipeline
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
from ops.load_draft.op import LoadDraft
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.answers import Answer

CONTENT = ("report.json", "prompts.jsonl")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A perfect MTP head, and tokens for its target."""
    folder = tmp_path_factory.mktemp("inputs")
    checkpoint = mtp_checkpoint("qwen3_5", folder / "checkpoint", noise=0.0)
    stage = FakeStage(folder / "target")
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    target = stage.artifact(TargetModel)
    stage = FakeStage(folder / "ingest")
    ingest(Ingest(source="builtin:digits", max_samples=12, seed=0), stage)
    stage = FakeStage(folder / "inject", {"samples": stage.artifact(Samples)})
    inject_images(InjectImages(samples=Ref("ingest")), stage)
    stage = FakeStage(folder / "tokenize", {"samples": stage.artifact(ImageSamples), "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), target=Ref("target")), stage)
    return {"target": target, "tokens": stage.artifact(TokenShards)}


def evaluated(folder, inputs, stop_after=None, **changes) -> FakeStage:
    stage = FakeStage(folder, inputs, stop_after=stop_after)
    evaluate(evaluate_config(draft=None, mtp=True, max_new_tokens=8, batch_size=1, **changes), stage)
    return stage


def test_a_perfect_head_gives_whole_blocks_without_a_loss_stopped_or_not(tmp_path, inputs):
    stage = evaluated(tmp_path / "whole", inputs, block_sizes=(2,))
    report = read_json(stage.out_dir / "report.json")
    assert True is report["mtp"] and {"target", "tokens"} == set(report["inputs"])
    assert {"errors": 0, "ties": 0} == report["lossless"]
    assert (4, 4, 4.0) == (report["block_size"], report["block_size_trained"], report["tau"]["all"]["tau"])
    assert {"2": 2.0, "4": 4.0} == {size: tau["tau"] for size, tau in report["tau_by_block"].items()}
    assert "tau_random" not in report
    with pytest.raises(StopRequested):
        evaluated(tmp_path / "stopped", inputs, stop_after=1, block_sizes=(2,))
    again = evaluated(tmp_path / "stopped", inputs, block_sizes=(2,))
    for name in CONTENT:
        assert (stage.out_dir / name).read_bytes() == (again.out_dir / name).read_bytes()
    assert "own MTP head" in str(list(evaluate_sections(stage.out_dir)))
    beside = [Answer(row["id"], row["category"], 8, 4) for row in read_jsonl(stage.out_dir / "prompts.jsonl")]
    rival = rival_of(stage.out_dir, 7.0, Result(0, 100, 1.0, tuple(beside)))
    assert (4.0, 2.0, 7.0, 4) == (rival.ranked.tau, rival.ranked.above, rival.ranked.seconds, rival.block_size)


def test_a_target_without_a_head_is_refused_by_plan_and_run(tmp_path, inputs):
    config = evaluate_config(draft=None, mtp=True)
    target = attrs.evolve(
        inputs["target"], path=shutil.copytree(inputs["target"].path, tmp_path / "target"), digest="another"
    )
    checkpoint = target.path / "model"

    def planned() -> dict[str, str]:
        forecast = TargetForecast.of(read_config(checkpoint), checkpoint)
        return conflicts(config, {"draft": None, "target": forecast, "tokens": None})

    assert {} == planned()
    file = checkpoint / "model.safetensors"
    own = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("mtp.")}
    save_file(own, file, metadata={"format": "pt"})
    assert ["mtp"] == list(planned())
    assert "hold no MTP head: no tensor is named mtp.*" in planned()["mtp"]
    with pytest.raises(DataError, match="hold no MTP head"):
        evaluated(tmp_path / "run", inputs | {"target": target})
    absent = TargetForecast.of(read_config(checkpoint), tmp_path / "owner" / "name")
    assert {} == conflicts(config, {"draft": None, "target": absent, "tokens": None})


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [({}, "draft", 'key "draft" is missing'), ({"draft": Ref("draft"), "mtp": True}, "mtp", "leave one of them out")],
)
def test_an_evaluation_has_a_draft_or_mtp(given, field, words):
    pipeline = Pipeline("p")
    target = pipeline.node("target", LoadTarget(checkpoint=str(__file__)))
    samples = pipeline.node("ingest", Ingest(source="builtin:digits"))
    images = pipeline.node("inject", InjectImages(samples=samples))
    tokens = pipeline.node("tokenize", TokenizeChat(samples=images, target=target))
    pipeline.node("draft", LoadDraft(target=target, source=str(__file__)))
    pipeline.node("eval", Evaluate(target=target, tokens=tokens, **given))
    with pytest.raises(PipelineError) as caught:
        compile_pipeline(pipeline)
    (mistake,) = caught.value.mistakes
    assert mistake.path == f"node.eval.{field}"
    assert words in mistake.what


def test_the_gate_takes_no_evaluation_of_a_head():
    assert ["mtp = True"] == unlike_serving({"mtp": True}, 4)
    report = {"max_new_tokens": 8, "dtype": "float32", "inputs": {}, "mtp": True, "block_size": 4}
    assert ["mtp = True"] == unlike_serving(ReportForecast.of(report).settings, 4)
