"""Fine-tuning: exact resume, what a step computes, what is measured, and what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from fake_stage import FakeStage, folder_digest
from finetune_cases import config, poisoned, relabelled, train, write_inputs
from import_graph import PYTHON_PATH, SUPPORT
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dsl.errors import ConfigError, DataError, PipelineError, StopRequested
from dsl.read_toml import read_graph
from ops.artifacts import TargetModel
from ops.finetune_vlm.batches import Order, micro_batches
from ops.finetune_vlm.measuring import greedy_answers
from ops.finetune_vlm.start import start_target
from ops.lib.data.files import read_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.embedding_and_head import frozen_ends
from ops.lib.target.model import Target

HERE = SUPPORT / "training"
PROJECTOR = "model.visual.merger.linear_fc1.weight"
VISION = "model.visual.blocks.0.mlp.linear_fc1.weight"
TEXT = "model.language_model.layers.0.mlp.gate_proj.weight"
RECOMPUTED = {"gradient_checkpointing": True}
EMBEDDINGS = "model.language_model.embed_tokens.weight"


def weights_of(stage):
    return load_file(stage.out_dir / "model" / "model.safetensors")


def test_a_stopped_training_ends_with_the_same_bytes_as_an_uninterrupted_one(tokens, target, tmp_path, capsys):
    with pytest.raises(StopRequested, match="after step 1 of 2"):
        train(tmp_path, tokens, stop_after=1)
    again = train(tmp_path, tokens)
    assert again.logged[0][1] == 2
    assert "info: goes on from the checkpoint at step 1 of 2\n" in capsys.readouterr().out
    assert folder_digest(target.path) == folder_digest(again.out_dir)


def test_a_training_killed_by_kill_9_ends_with_the_same_bytes(tokens, target, tmp_path):
    write_inputs(tmp_path, tokens)
    worker = [sys.executable, str(HERE / "finetune_worker.py"), "kill", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    killed = subprocess.run(worker, env=environment, check=False, timeout=120)
    assert -signal.SIGKILL == killed.returncode
    assert ["checkpoint-00000001"] == [path.name for path in (tmp_path / "work").iterdir()]
    again = train(tmp_path, tokens)
    assert [2] == [step for metrics, step in again.logged if "target/loss" in metrics]
    assert folder_digest(target.path) == folder_digest(again.out_dir)


def test_logging_measuring_and_checkpoints_change_nothing(tokens, target, tmp_path):
    stage = train(tmp_path, tokens, log_every=1, checkpoint_every=1, eval_every=1)
    assert [step for metrics, step in stage.logged if "target/loss" in metrics] == [1, 2]
    assert "target/loss" == next(iter(stage.logged[0][0]))  # the screen shows the first few
    assert [step for metrics, step in stage.logged if "target/val_loss" in metrics] == [1, 2]
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
    assert torch.equal(head.weight_VM, model.get_output_embeddings().weight)


def test_the_loss_is_the_mean_over_answer_tokens(tokens, target, tmp_path):
    reader, loaded = TokenReader(tokens, "train"), Target.load(target)
    stage = train(tmp_path, tokens, init=str(target.path / "model"), steps=1, batch_size=3)
    slow = []
    for index in Order([1] * len(reader), 0, 3).samples(1):
        sample = reader.sample(index)
        with torch.no_grad():
            logits_SV = loaded.forward(loaded.inputs([sample])).logits[0]
        for position in range(1, len(sample.input_ids)):
            if sample.loss_mask[position]:
                slow.append(F.cross_entropy(logits_SV[position - 1], sample.input_ids[position]))
    assert [pytest.approx(float(torch.stack(slow).mean()), rel=1e-5)] == stage.metric("target/loss")


def test_a_step_in_several_passes_or_with_recomputed_layers_equals_one_batch(tokens, target, tmp_path):
    """Loss and norm of two steps; the second step's are those behind an update."""
    few = {"init": str(target.path / "model"), "batch_size": 4, "log_every": 1, "lr": 1e-4}
    whole = train(tmp_path / "whole", tokens, **few)
    for number, changes in enumerate([{"micro_batch_tokens": 1}, {"micro_batch_tokens": 300, **RECOMPUTED}]):
        cut = train(tmp_path / str(number), tokens, **few, **changes)
        for name in ("target/loss", "target/grad_norm"):
            assert pytest.approx(whole.metric(name), rel=1e-4) == cut.metric(name)


def test_greedy_answers_of_a_mixed_batch_are_those_of_transformers_generate(tokens, target):
    reader, loaded = TokenReader(tokens, "test"), Target.load(target)
    samples = [reader.sample(index) for index in (0, 1, 2, len(reader) - 2, len(reader) - 1)]
    assert {True, False} == {len(sample.image_grid_thw) > 0 for sample in samples}
    assert len({sample.prompt_tokens for sample in samples}) > 1
    answers = greedy_answers(loaded, samples, 6)
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
    order = Order([7] * 33, seed=0, batch_size=8)
    epochs = [[index for step in range(1 + 4 * e, 5 + 4 * e) for index in order.samples(step)] for e in range(2)]
    assert [len(set(epoch)) for epoch in epochs] == [32, 32]
    assert epochs[0] != epochs[1]
    assert sorted(Order([7] * 5, seed=0, batch_size=8).samples(1)) == [0, 1, 2, 3, 4]


def test_a_large_seed_is_a_seed_like_others():
    orders = [Order([7] * 40, seed, batch_size=40).samples(1) for seed in (0, 1, 2**62 + 5, 2**63 - 1)]
    assert [list(range(40))] * 4 == [sorted(order) for order in orders]
    assert 4 == len({tuple(order) for order in orders})


def test_steps_by_tokens_are_as_full_as_the_order_allows():
    lengths = [3, 9, 4, 4, 5, 1, 2, 30, 6, 8]
    order = Order(lengths, seed=3, batch_tokens=12)
    steps = [order.samples(step) for step in range(1, 5)]
    assert [step for step in steps if sum(lengths[index] for index in step) > 12] == [s for s in steps if s == [7]]
    for step, after in pairwise(steps):
        assert sum(lengths[index] for index in [*step, after[0]]) > 12
    assert [[0, 1]] == [sorted(Order([3, 4], seed=0, batch_tokens=100).samples(step)) for step in (1,)]


def test_passes_are_as_many_on_every_row_and_hold_each_sample_once():
    lengths = [10, 20, 30, 40, 50, 60, 70]
    samples = [6, 0, 3, 5, 1]
    rows = [micro_batches(samples, lengths, 90, row, 3) for row in range(3)]
    assert 1 == len({len(row) for row in rows})
    assert sorted(samples) == sorted(index for row in rows for batch in row for index in batch)
    for batch in (batch for row in rows for batch in row if len(batch) > 1):
        assert len(batch) * max(lengths[index] for index in batch) <= 90
    assert [samples] == micro_batches(samples, lengths, 1000)
    assert [[[0]], [[]]] == [micro_batches([0], lengths, 5, row, 2) for row in range(2)]


def test_each_part_moves_at_its_own_rate(tokens, target, tmp_path):
    """The first update of AdamW is the rate times the sign of the gradient, wherever that is not tiny."""
    before = load_file(target.path / "model" / "model.safetensors")
    rates = {"lr": 1e-3, "lr_vision": 1e-4, "lr_projector": 1e-5}
    stage = train(tmp_path, tokens, init=str(target.path / "model"), steps=1, batch_size=4, weight_decay=0.0, **rates)
    after = weights_of(stage)
    names = {VISION: 1e-4, PROJECTOR: 1e-5, TEXT: 1e-3, EMBEDDINGS: 1e-3}
    assert {name: pytest.approx(rate, rel=0.05) for name, rate in names.items()} == {
        name: float((after[name] - before[name]).abs().max()) for name in names
    }


def test_frozen_parts_stay_as_they_are_and_have_no_moments(tokens, target, tmp_path):
    before = load_file(target.path / "model" / "model.safetensors")
    stage = FakeStage(tmp_path, {"tokens": tokens}, stop_after=1)
    frozen = {"batch_size": 2, "init": str(target.path / "model"), "freeze": ("vision", "embeddings")}
    with pytest.raises(StopRequested):
        train(stage, **frozen)
    kept = load_file(tmp_path / "work" / "checkpoint-00000001" / "state.safetensors")
    assert {f"model.{TEXT}", f"optimizer.{TEXT}.exp_avg"} <= kept.keys()
    assert not [name for name in kept if VISION in name or EMBEDDINGS in name]
    after = weights_of(train(tmp_path, tokens, **frozen))
    moved = {name for name in (VISION, PROJECTOR, TEXT, EMBEDDINGS) if not torch.equal(before[name], after[name])}
    assert {PROJECTOR, TEXT} == moved


def test_muon_moves_hidden_matrices_adamw_the_rest_and_a_stop_changes_nothing(tokens, target, tmp_path):
    muon = {"init": str(target.path / "model"), "optimizer": "muon", "steps": 2, "batch_size": 4, "weight_decay": 0.0}
    before = load_file(target.path / "model" / "model.safetensors")
    stage = train(tmp_path / "one", tokens, **{**muon, "steps": 1, "lr": 1e-3})
    sizes = {
        name: float((weights_of(stage)[name] - before[name]).square().mean().sqrt()) for name in (TEXT, EMBEDDINGS)
    }
    assert 0.5e-3 < sizes[EMBEDDINGS] <= 1e-3, "AdamW's first update is the rate times the gradient's sign"
    assert sizes[TEXT] == pytest.approx(0.2e-3, rel=0.2), "Muon's is scaled to 0.2 of the rate, root mean square"
    with pytest.raises(StopRequested):
        train(tmp_path / "stopped", tokens, stop_after=1, **muon)
    kept = load_file(tmp_path / "stopped" / "work" / "checkpoint-00000001" / "state.safetensors")
    assert {f"optimizer.{TEXT}.momentum_buffer", f"optimizer.{EMBEDDINGS}.exp_avg"} <= kept.keys()
    again, whole = train(tmp_path / "stopped", tokens, **muon), train(tmp_path / "whole", tokens, **muon)
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)


def test_steps_without_an_image_leave_the_vision_tower_as_it_is(tokens, target, tmp_path):
    before = load_file(target.path / "model" / "model.safetensors")
    text_only = poisoned(tokens, tmp_path / "text", keep=lambda record: record["category"] == "text")
    stage = train(tmp_path, text_only, init=str(target.path / "model"), batch_size=2)
    after = weights_of(stage)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items() if ".visual." in name)
    assert not torch.equal(before[TEXT], after[TEXT])


@pytest.mark.parametrize("limit", [1, 150, 16384])
def test_the_vision_side_alone_is_trained_whatever_passes_have_no_image(tokens, target, tmp_path, limit):
    """Steps of four samples in one pass or several; the gradients are those of one pass."""
    few = {"init": str(target.path / "model"), "batch_size": 4, "log_every": 1, "lr": 1e-4}
    few["freeze"] = ("text", "embeddings")
    whole = train(tmp_path / "whole", tokens, **few)
    cut = train(tmp_path / "cut", tokens, **few, micro_batch_tokens=limit)
    assert all(norm > 0 for norm in whole.metric("target/grad_norm"))
    for name in ("target/loss", "target/grad_norm"):
        assert pytest.approx(whole.metric(name), rel=1e-4) == cut.metric(name)
    before, after = load_file(target.path / "model" / "model.safetensors"), weights_of(cut)
    moved = {name for name in (VISION, PROJECTOR, TEXT, EMBEDDINGS) if not torch.equal(before[name], after[name])}
    assert {VISION, PROJECTOR} == moved


def test_a_step_with_nothing_to_train_updates_nothing_and_is_finite(tokens, target, tmp_path):
    text_only = poisoned(tokens, tmp_path / "text", keep=lambda record: record["category"] == "text")
    frozen = {"init": str(target.path / "model"), "batch_size": 2, "log_every": 1, "freeze": ("text", "embeddings")}
    stage = train(tmp_path, text_only, **frozen)
    assert [0.0, 0.0] == stage.metric("target/grad_norm") == stage.metric("target/nonfinite_steps")
    assert all(loss > 0 for loss in stage.metric("target/loss"))
    before, after = load_file(target.path / "model" / "model.safetensors"), weights_of(stage)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_training_goes_on_when_the_checkpoint_it_started_from_has_moved(tokens, target, tmp_path):
    few = {"batch_size": 2, "steps": 2}
    whole = train(tmp_path / "whole", tokens, init=str(target.path / "model"), **few)
    with pytest.raises(StopRequested):
        train(tmp_path / "cut", tokens, stop_after=1, init=str(target.path / "model"), **few)
    shutil.copytree(target.path / "model", tmp_path / "moved")
    again = train(tmp_path / "cut", tokens, init=str(tmp_path / "moved"), **few)
    assert [2] == [step for metrics, step in again.logged if "target/loss" in metrics]
    assert folder_digest(whole.out_dir) == folder_digest(again.out_dir)


def test_a_degree_that_does_not_fit_is_refused_before_weights_are_read(tokens, target, tmp_path):
    shutil.copytree(target.path / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    stage = FakeStage(tmp_path, {"tokens": tokens}, world_size=3, sp_degree=3)
    with pytest.raises(ConfigError, match="3 ranks need 6 key/value heads"):
        start_target(config(init=str(tmp_path / "model")), TokenReader(tokens, "train"), stage)


def test_norms_are_not_decayed(tokens, target, tmp_path):
    stages = [
        train(
            tmp_path / str(decay),
            tokens,
            init=str(target.path / "model"),
            steps=1,
            batch_size=2,
            lr=1e-6,
            weight_decay=decay,
        )
        for decay in (0.0, 1000.0)
    ]
    plain, decayed = (weights_of(stage) for stage in stages)
    norm = "model.language_model.layers.0.input_layernorm.weight"
    assert torch.equal(plain[norm], decayed[norm])
    assert not torch.equal(plain[TEXT], decayed[TEXT])


def test_bfloat16_trains_float32_weights_and_writes_bfloat16(tokens, target, tmp_path):
    init = str(target.path / "model")
    exact = train(tmp_path / "float32", tokens, init=init, batch_size=2, log_every=1)
    short = relabelled(tokens, tmp_path / "short", "test", lambda _number: "no")
    half = {"batch_size": 2, "init": init, "dtype": "bfloat16", "log_every": 1, "metric": "exact_match"}
    with pytest.raises(StopRequested):
        train(tmp_path / "bfloat16", short, stop_after=2, **half)  # asked in the measurement before, too
    kept = load_file(tmp_path / "bfloat16" / "work" / "checkpoint-00000001" / "state.safetensors")
    assert torch.float32 == kept[f"model.{TEXT}"].dtype
    stage = train(tmp_path / "bfloat16", short, **half)
    assert pytest.approx(exact.metric("target/loss")[1:], rel=0.02) == stage.metric("target/loss")
    weights = weights_of(stage)
    assert {torch.bfloat16} == {tensor.dtype for tensor in weights.values()}
    written = read_json(stage.out_dir / "model" / "config.json")
    assert ["bfloat16", "bfloat16"] == [written["dtype"], written["text_config"]["dtype"]]
    loaded = Target.load(stage.artifact(TargetModel), dtype=torch.bfloat16)
    assert torch.equal(weights[TEXT], loaded.model.get_parameter(TEXT))


def test_a_loss_that_is_not_finite_names_the_step_and_the_samples(tokens, tmp_path):
    bad = poisoned(tokens, tmp_path / "bad", "train", lambda tensors: tensors["pixel_values"].fill_(float("nan")))
    with pytest.raises(DataError, match=r"step 1: loss nan .*digit-\d+"):
        train(tmp_path, bad, max_nonfinite=1)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tokens, target, tmp_path):
    images = poisoned(tokens, tmp_path / "images", keep=lambda record: record["category"] == "image")
    bad = poisoned(
        images, tmp_path / "bad", "train", lambda tensors: tensors["pixel_values"].chunk(2)[0].fill_(math.nan)
    )
    stage = train(tmp_path, bad, init=str(target.path / "model"), batch_size=1, steps=8, max_nonfinite=8)
    skipped = stage.metric("target/nonfinite_steps")[-1]
    assert 0 < skipped < 8
    assert skipped == read_json(stage.out_dir / "metrics.json")["nonfinite_steps"]
    (warning,) = stage.warnings
    assert warning.startswith(
        f"{skipped:.0f} of 8 steps were skipped ({skipped:.0f} with a loss or gradient that is not"
    )
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(stage).values())


def test_a_fine_tuning_of_which_no_step_was_applied_has_failed(tokens, target, tmp_path):
    images = poisoned(tokens, tmp_path / "images", keep=lambda record: record["category"] == "image")
    bad = poisoned(images, tmp_path / "bad", "train", lambda tensors: tensors["pixel_values"].fill_(float("nan")))
    with pytest.raises(
        DataError, match=r"untrained: 2 of 2 steps were skipped \(2 with a loss or gradient that is not f"
    ):
        train(tmp_path, bad, init=str(target.path / "model"), batch_size=2)


def test_val_and_test_samples_change_no_weight(tokens, target, tmp_path):
    def change(tensors):
        tensors["input_ids"][tensors["input_ids"] > 100] = 99
        tensors["loss_mask"][:] = 1

    other = poisoned(poisoned(tokens, tmp_path / "val", "val", change), tmp_path / "test", "test", change)
    stage = train(tmp_path, other)
    files = [path / "model" / "model.safetensors" for path in (target.path, stage.out_dir)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_stop_after_the_last_step_ends_the_training(tokens, target, tmp_path):
    stage = train(tmp_path, tokens, stop_after=2, checkpoint_every=1)
    assert folder_digest(target.path) == folder_digest(stage.out_dir)


def test_training_goes_on_from_a_checkpoint_directory(tokens, target, tmp_path):
    stage = train(tmp_path, tokens, init=str(target.path / "model"), steps=1, lr=1e-12, weight_decay=0.0)
    before = load_file(target.path / "model" / "model.safetensors")
    after = weights_of(stage)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_checkpoint_of_another_training_is_refused(tokens, tmp_path):
    with pytest.raises(StopRequested):
        train(tmp_path, tokens, stop_after=1)
    with pytest.raises(ConfigError, match=r"grad_clip: 1\.0 then, 0\.5 now"):
        train(tmp_path, tokens, grad_clip=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": float("inf")}, "lr: must be < 1"),
        ({"batch_tokens": 100}, "batch_size and batch_tokens: give only one of them"),
        ({"metric": "pattern"}, "needs 'pattern'"),
        ({"metric": "pattern", "pattern": "(a)(b)"}, "must have one group, got 2"),
        ({"metric": "pattern", "pattern": "(a"}, "not a regular expression"),
        ({"pattern": "(a)"}, 'only for metric = "pattern"'),
        ({"freeze": ("visual",)}, "freeze"),
        ({"freeze": ("vision",), "lr_vision": 1e-4}, "'lr_vision' is given, but freeze contains \"vision\""),
        ({"freeze": ("text", "projector"), "lr_projector": 1e-4}, "'lr_projector' is given"),
    ],
)
def test_fields_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_an_unknown_builtin_target_is_refused(tokens, tmp_path):
    with pytest.raises(DataError, match="the only built-in target"):
        train(tmp_path, tokens, init="builtin:other")


def test_freezing_everything_is_refused(tokens, tmp_path):
    with pytest.raises(ConfigError, match="no part of the target is left"):
        train(tmp_path, tokens, freeze=("vision", "projector", "text", "embeddings"))


def test_an_empty_train_split_is_refused(tokens, tmp_path):
    with pytest.raises(DataError, match="the train split has no samples"):
        train(tmp_path, poisoned(tokens, tmp_path / "none", keep=lambda record: record["split"] != "train"))


@pytest.mark.parametrize(
    ("processor", "init", "is_refused"),
    [
        ("builtin", "checkpoint", True),
        ("builtin", "builtin:tiny-qwen3-vl", False),
        ("checkpoint", "checkpoint", False),
    ],
)
def test_a_checkpoint_is_not_trained_on_tokens_of_the_built_in_tokenizer(tmp_path, processor, init, is_refused):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "chat.jsonl").write_text("{}")
    file = tmp_path / "one.toml"
    file.write_text(
        '[pipeline]\nname = "one"\n[node.ingest]\nop = "ingest"\nsource = "chat.jsonl"\n[node.inject]\n'
        'op = "inject_images"\nsamples = "@ingest"\n[node.tokenize]\nop = "tokenize_chat"\nsamples = "@inject"\n'
        f'processor = "{processor}"\n[node.target]\nop = "finetune_vlm"\ntokens = "@tokenize"\ninit = "{init}"\n'
    )
    if not is_refused:
        assert "target" in read_graph(file, [], []).nodes
        return
    with pytest.raises(PipelineError) as caught:
        read_graph(file, [], [])
    (mistake,) = map(str, caught.value.mistakes)
    assert 'node.target.init: the tokens are those of processor = "builtin", which no checkpoint knows' in mistake
