"""Fine-tuning: exact resume, what it measures, and what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from fake_stage import FakeStage, folder_digest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dsl.errors import ConfigError, DataError, StopRequested
from dsl.op import Ref
from ops.artifacts import TargetModel, TokenShards
from ops.finetune_vlm.accuracy import answer_loss, greedy_starts
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.run import batch_indices, finetune_vlm
from ops.load_target.ends import frozen_ends
from ops.load_target.model import Target
from ops.tokenize_chat.shards import TokenReader


def config(**changes):
    return FinetuneVlm(tokens=Ref("tokenize"), **{"steps": 2, "batch_size": 8, "eval_samples": 2, "seed": 0, **changes})


def test_a_stopped_training_ends_with_the_same_bytes_as_an_uninterrupted_one(tokens, target, tmp_path):
    with pytest.raises(StopRequested, match="after step 1 of 2"):
        finetune_vlm(config(), FakeStage(tmp_path, {"tokens": tokens}, stop_after=0))
    again = FakeStage(tmp_path, {"tokens": tokens})
    finetune_vlm(config(), again)
    assert again.logged[0][1] == 2
    assert folder_digest(target.path) == folder_digest(again.out_dir)


def test_logging_and_checkpoints_change_nothing(tokens, target, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens})
    finetune_vlm(config(log_every=1, checkpoint_every=1), stage)
    assert [step for metrics, step in stage.logged if "target/loss" in metrics] == [1, 2]
    assert folder_digest(target.path) == folder_digest(stage.out_dir)


def test_the_result_is_a_checkpoint_that_transformers_loads(target):
    model = AutoModelForImageTextToText.from_pretrained(target.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(target.path / "model")
    info = json.loads((target.path / "target.json").read_text())
    assert (
        model.config.model_type,
        info["vision"],
        info["vocab_size"],
        info["hidden_size"],
        info["num_layers"],
        info["tied"],
    ) == ("qwen3_vl", True, 600, 128, 8, True)
    assert info["mask_token_id"] == tokenizer.convert_tokens_to_ids("<|mask|>")
    embed, head = frozen_ends(target)
    assert torch.equal(embed, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)


def test_the_loss_is_the_mean_over_answer_tokens(tokens, target):
    reader, loaded = TokenReader(tokens, "train"), Target.load(target)
    samples = [reader.sample(index) for index in (0, 1, len(reader) - 1)]
    with torch.no_grad():
        total, count = answer_loss(loaded, samples)
        slow = []
        for sample in samples:
            logits_SV = loaded.forward(loaded.inputs([sample])).logits[0]
            for position in range(1, len(sample.input_ids)):
                if sample.loss_mask[position]:
                    slow.append(F.cross_entropy(logits_SV[position - 1], sample.input_ids[position]))
    assert len(slow) == count
    torch.testing.assert_close(total, torch.stack(slow).sum(), rtol=1e-5, atol=1e-4)


def test_greedy_starts_are_those_of_transformers_generate(tokens, target):
    reader, loaded = TokenReader(tokens, "test"), Target.load(target)
    samples = [reader.sample(index) for index in range(4)]
    done = []
    answers = greedy_starts(loaded, samples, 6, done.append)
    assert done[-1] == 4
    for sample, answer in zip(samples, answers, strict=True):
        prompt = sample.input_ids[: sample.prompt_tokens][None]
        arguments = {}
        if len(sample.image_grid_thw):
            arguments = {
                "pixel_values": sample.pixel_values,
                "image_grid_thw": sample.image_grid_thw,
                "mm_token_type_ids": (prompt == reader.info["image_token_id"]).int(),
            }
        loaded.forget_positions()
        generated = loaded.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=reader.info["eos_token_ids"],
            pad_token_id=reader.info["pad_token_id"],
            **arguments,
        )[0, prompt.shape[1] :].tolist()
        assert answer == [token for token in generated if token not in loaded.eos_token_ids]


def test_every_epoch_takes_each_sample_at_most_once_in_another_order():
    epochs = [[i for step in range(1 + 4 * e, 5 + 4 * e) for i in batch_indices(config(), 33, step)] for e in range(2)]
    assert [len(set(epoch)) for epoch in epochs] == [32, 32]
    assert epochs[0] != epochs[1]
    assert sorted(batch_indices(config(), 5, 1)) == [0, 1, 2, 3, 4]


def test_a_loss_that_is_not_finite_names_the_step_and_the_samples(tokens, tmp_path):
    folder = tmp_path / "poisoned"
    shutil.copytree(tokens.path, folder)
    for file in folder.glob("train-*"):
        tensors = load_file(file)
        tensors["pixel_values"][:] = float("nan")
        save_file(tensors, file)
    with pytest.raises(DataError, match=r"step 1: the loss is nan; samples .*digit-\d+"):
        finetune_vlm(config(), FakeStage(tmp_path, {"tokens": TokenShards(folder, "poisoned")}))


def test_a_learning_rate_that_cannot_be_meant_is_refused():
    with pytest.raises(ConfigError, match="'lr' must be < 1"):
        config(lr=float("inf"))


def test_val_and_test_samples_change_no_weight(tokens, target, tmp_path):
    folder = tmp_path / "poisoned"
    shutil.copytree(tokens.path, folder)
    for file in (*folder.glob("val-*"), *folder.glob("test-*")):
        tensors = load_file(file)
        tensors["input_ids"][tensors["input_ids"] > 100] = 99
        tensors["loss_mask"][:] = 1
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    stage = FakeStage(tmp_path, {"tokens": TokenShards(folder, "poisoned")})
    finetune_vlm(config(), stage)
    weights = [path / "model" / "model.safetensors" for path in (target.path, stage.out_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_stop_after_the_last_step_ends_the_training(tokens, target, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens}, stop_after=1)
    finetune_vlm(config(checkpoint_every=1), stage)
    assert folder_digest(target.path) == folder_digest(stage.out_dir)


def test_training_goes_on_from_a_checkpoint_directory(tokens, target, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens})
    finetune_vlm(config(init=str(target.path / "model"), steps=1, lr=1e-12, weight_decay=0.0), stage)
    before = Target.load(target).model.state_dict()
    after = Target.load(stage.artifact(TargetModel)).model.state_dict()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=1e-5)


def test_an_unknown_builtin_target_is_refused(tokens, tmp_path):
    with pytest.raises(DataError, match="the only built-in target"):
        finetune_vlm(config(init="builtin:other"), FakeStage(tmp_path, {"tokens": tokens}))
