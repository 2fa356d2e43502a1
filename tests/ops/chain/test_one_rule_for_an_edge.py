"""A stage refuses what its inputs lack with the sentence of the plan: both call `conflicts` of the op's conflicts.py, a
plan on what is promised, a stage on an artifact that may come from an older store or another producer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_chain import EOS, MASK, PAD, TEXT, VOCAB, make_features, make_inputs, make_target, tiny_config, train_config
from fake_stage import FakeStage

from dsl.errors import DataError
from dsl.estimate import PROMISED
from dsl.op import Ref
from ops.artifacts import Draft, DraftCheckpoint, ImageSamples, TokenShards
from ops.capture_targets.conflicts import conflicts as capture_conflicts
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.evaluate.conflicts import conflicts as evaluate_conflicts
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.export_draft.conflicts import conflicts as export_conflicts
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.finetune_vlm.conflicts import conflicts as finetune_conflicts
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.run import finetune_vlm
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.forecasts import (
    Answered,
    DraftForecast,
    FeaturesForecast,
    SamplesForecast,
    TargetForecast,
    TokensForecast,
)
from ops.regenerate_answers.conflicts import conflicts as regenerate_conflicts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.shard_sequence.conflicts import conflicts as shard_conflicts
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.conflicts import conflicts as tokenize_conflicts
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.conflicts import conflicts as train_conflicts
from ops.train_dflash.run import train_dflash

TARGET = TargetForecast.of({"text_config": TEXT}, eos_token_ids=(EOS,), pad_token_id=PAD, mask_token_id=MASK)
NO_TRAIN = frozenset({"train"})


def tokens_of(folder: Path, **changes: Any) -> TokenShards:
    folder.mkdir()
    shards = [{"file": "val-00000.safetensors", "split": "val", "samples": 1, "tokens": 9}]
    info = {"shards": shards, "vocab_size": VOCAB, "eos_token_ids": [EOS], "pad_token_id": PAD, **changes}
    write_json(folder / "tokens.json", info)
    write_jsonl(folder / "samples.jsonl", [])
    return TokenShards(folder, "k" * 64)


def samples_of(folder: Path, answered: Any = None) -> ImageSamples:
    folder.mkdir()
    write_jsonl(folder / "samples.jsonl", [])
    write_json(folder / "summary.json", {"splits": {"train": 0, "val": 0, "test": 3}})
    if answered is not None:
        write_json(folder / "answered.json", answered)
    return ImageSamples(folder, "s" * 64)


def draft_of(folder: Path, **training: Any) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", to_serving(tiny_config()))
    write_json(folder / "training.json", training)
    return folder


def promised_tokens(**known: Any) -> TokensForecast:
    return TokensForecast(by_split=None, expected=None, longest=9, **{"vocab_size": VOCAB, **known})


def the_same(
    tmp_path: Path, run: Any, conflicts: Any, config: Any, inputs: dict[str, Any], promised: dict[str, Any]
) -> str:
    """The sentence, which plan and stage share."""
    edges = dict.fromkeys(type(config).__op__.edges)
    sentences = conflicts(config, edges | promised)
    assert 1 == len(sentences), sentences
    with pytest.raises(DataError) as caught:
        run(config, FakeStage(tmp_path / "stage", edges | inputs))
    (sentence,) = sentences.values()
    assert str(caught.value).endswith(sentence), (str(caught.value), sentence)
    return str(sentence)


def test_a_training(tmp_path):
    features = FeaturesForecast(num_layers=2, dtype="float32", tokens=None, target_layer_ids=(0, 1), final_hidden=False)
    config = train_config(loss="kl")
    told = the_same(
        tmp_path, train_dflash, train_conflicts, config, make_inputs(tmp_path), {"target": TARGET, "features": features}
    )
    assert 'loss = "kl" needs the target\'s final hidden states: set final_hidden = true in capture_targets' == told


def test_a_mask_token_that_ends_answers(tmp_path):
    inputs = make_inputs(tmp_path)
    inputs["features"] = make_features(tmp_path / "features2", inputs["target"], mask_token_id=EOS)
    wrong = TargetForecast.of({"text_config": TEXT}, eos_token_ids=(EOS,), mask_token_id=EOS)
    told = the_same(tmp_path, train_dflash, train_conflicts, train_config(), inputs, {"target": wrong})
    assert told.startswith(f"mask_token_id {EOS} is the pad or an EOS id of the target")


def test_a_plan_of_batches(tmp_path):
    tokens = tokens_of(tmp_path / "tokens")
    promised = {"tokens": promised_tokens(empty=NO_TRAIN)}
    config = ShardSequence(tokens=Ref("t"))
    told = the_same(tmp_path, shard_sequence, shard_conflicts, config, {"tokens": tokens}, promised)
    assert "the split train has no samples; there is nothing to train on" == told


def test_a_training_of_the_target(tmp_path):
    tokens = tokens_of(tmp_path / "tokens")
    promised = {"tokens": promised_tokens(empty=NO_TRAIN)}
    told = the_same(
        tmp_path, finetune_vlm, finetune_conflicts, FinetuneVlm(tokens=Ref("t")), {"tokens": tokens}, promised
    )
    assert "the train split has no samples: nothing to train the target on" == told


def test_a_capture(tmp_path):
    inputs = {"tokens": tokens_of(tmp_path / "tokens", eos_token_ids=[3]), "target": make_target(tmp_path / "target")}
    promised = {"tokens": promised_tokens(eos_token_ids=(3,)), "target": TARGET}
    config = CaptureTargets(tokens=Ref("t"), target=Ref("m"), num_layers=1)
    told = the_same(tmp_path, capture_targets, capture_conflicts, config, inputs, promised)
    assert f"their EOS ids are [3], and the target ends at [{EOS}]" in told


def test_an_answer_in_a_short_context(tmp_path):
    inputs = {"samples": samples_of(tmp_path / "samples"), "target": make_target(tmp_path / "target")}
    config = RegenerateAnswers(samples=Ref("s"), target=Ref("m"), splits=("test",))
    promised = {"samples": SamplesForecast(), "target": TARGET}
    told = the_same(tmp_path, regenerate_answers, regenerate_conflicts, config, inputs, promised)
    assert "3072 + 1024 = 4096 tokens, and the target has 128 positions" in told


def test_prompts_that_the_target_did_not_answer(tmp_path):
    asked = {"enable_thinking": False}
    inputs = {"samples": samples_of(tmp_path / "samples", asked)}
    promised = {"samples": SamplesForecast(answered=Answered(enable_thinking=False))}
    config = TokenizeChat(samples=Ref("s"), prompts_only=True)
    told = the_same(tmp_path, tokenize_chat, tokenize_conflicts, config, inputs, promised)
    assert told.startswith("the answers were generated with false, and this node has null: give")


def test_prompts_with_tools_in_another_form_than_the_target_read(tmp_path):
    asked = {"enable_thinking": None, "tools_as": "sglang-0.5.23"}
    inputs = {"samples": samples_of(tmp_path / "samples", asked)}
    promised = {"samples": SamplesForecast(answered=Answered(enable_thinking=None, tools_as="sglang-0.5.23"))}
    config = TokenizeChat(samples=Ref("s"), prompts_only=True)
    told = the_same(tmp_path, tokenize_chat, tokenize_conflicts, config, inputs, promised)
    assert told.startswith('the answers were generated with tools as "sglang-0.5.23", and this node has "given": give')


def test_an_export(tmp_path):
    target, folder = make_target(tmp_path / "target"), draft_of(tmp_path / "draft", target="d" * 64)
    promised = DraftForecast(shape=tiny_config(), target="d" * 64)
    known = TargetForecast.of({"text_config": TEXT}, identity=target.digest)
    inputs = {"draft": DraftCheckpoint(folder, "c" * 64), "target": target}
    config = ExportDraft(draft=Ref("d"), target=Ref("m"))
    told = the_same(tmp_path, export_draft, export_conflicts, config, inputs, {"draft": promised, "target": known})
    assert f"this draft was trained for the target dddddddddddd, but the node's target is {target.digest[:12]}" in told


def test_an_evaluation(tmp_path):
    inputs = {
        "draft": Draft(draft_of(tmp_path / "draft"), "d" * 64),
        "target": make_target(tmp_path / "target"),
        "tokens": tokens_of(tmp_path / "tokens"),
    }
    promised = {
        "draft": DraftForecast(shape=tiny_config()),
        "target": TARGET,
        "tokens": promised_tokens(empty=frozenset({"test"})),
    }
    config = Evaluate(draft=Ref("d"), target=Ref("m"), tokens=Ref("t"), max_new_tokens=8)
    told = the_same(tmp_path, evaluate, evaluate_conflicts, config, inputs, promised)
    assert told.startswith('the split "test" has no samples to evaluate; set "split" of samples')


@pytest.mark.parametrize("is_found", [True, False])
def test_a_split_that_the_samples_left_empty_is_passed_over_before_the_features_exist_too(is_found: bool) -> None:
    empty = frozenset({"val"})
    tokens = TokensForecast(
        by_split=None,
        expected=None,
        longest=9,
        vocab_size=None,
        identity=f"{PROMISED}t",
        empty=empty,
        is_found=is_found,
    )
    features = FeaturesForecast(num_layers=1, dtype="float32", tokens=tokens, identity=f"{PROMISED}f", empty=empty)
    found = train_conflicts(train_config(eval_every=5), {"target": None, "features": features})
    assert (set() if is_found else {"eval_every"}) == found.keys()
