"""Every family of targets is fine-tuned from a checkpoint directory: text and images in one batch."""

from __future__ import annotations

import json

import pytest
import torch
from any_targets import any_checkpoint
from family_checkpoints import FAMILIES, make_checkpoint
from finetune_cases import poisoned, relabelled, train
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError
from ops.artifacts import TargetModel
from ops.finetune_vlm.measuring import greedy_answers
from ops.finetune_vlm.start import parts_of
from ops.lib.data.files import read_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import TargetStated
from ops.lib.target.model import Target, check_served, read_config


def parts_of_family(name: str) -> set[str]:
    return {"text", "embeddings"} | ({"vision", "projector"} if FAMILIES[name].vision else set())


@pytest.fixture(scope="module")
def texts(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens") / "texts"
    return poisoned(tokens, folder, keep=lambda record: record["category"] == "text")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tokens, texts, tmp_path_factory):
    """Name, checkpoint of the tokens' vocabulary with a head of its own, and tokens that the family can read."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(request.param, folder, vocab_size=600, num_hidden_layers=4, tie_word_embeddings=False)
    if request.param.startswith("qwen3_5"):  # as transformers writes the config of a model that it made itself
        config = read_config(checkpoint)
        del config["text_config"]["full_attention_interval"], config["vision_config"]["deepstack_visual_indexes"]
        (checkpoint / "config.json").write_text(json.dumps(config))
    return request.param, checkpoint, tokens if FAMILIES[request.param].vision else texts


def test_a_checkpoint_is_fine_tuned_by_steps_whose_cut_does_not_matter(family, tmp_path):
    name, checkpoint, tokens = family
    few = {"init": str(checkpoint), "steps": 2, "batch_size": 4, "lr": 1e-3, "log_every": 1}
    short = relabelled(tokens, tmp_path / "short", "test", lambda _number: "no such answer")
    whole = train(tmp_path / "whole", short, **few, metric="label_in_answer", max_new_tokens=30)
    cut = train(tmp_path / "cut", tokens, **few, micro_batch_tokens=200)
    for metric in ("target/loss", "target/grad_norm"):
        assert pytest.approx(whole.metric(metric), rel=1e-3) == cut.metric(metric)
    assert [0.0] == whole.metric("target/accuracy")
    before = load_file(checkpoint / "model.safetensors")
    after = load_file(whole.out_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    check_served(whole.out_dir / "model")
    trained = Target.load(whole.artifact(TargetModel))
    start = Target.from_directory(checkpoint, trained.info)
    moved = {
        part
        for parameter, part in parts_of(start).items()
        if not torch.equal(start.model.get_parameter(parameter), trained.model.get_parameter(parameter))
    }
    assert parts_of_family(name) == moved
    assert not torch.equal(before["lm_head.weight"], trained.head_weight)


def test_greedy_answers_of_a_batch_are_those_of_each_prompt_alone(family):
    _, checkpoint, tokens = family
    reader = TokenReader(tokens, "train")
    samples = [reader.sample(index) for index in (0, 1, 2, len(reader) - 2, len(reader) - 1)]
    target = Target.from_directory(checkpoint, {"eos_token_ids": reader.info["eos_token_ids"]})
    together = greedy_answers(target, samples, 5)
    assert [greedy_answers(target, [sample], 5)[0] for sample in samples] == together
    assert len(set(map(tuple, together))) > 1


def test_a_text_model_refuses_images(tokens, tmp_path):
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", vocab_size=600, num_hidden_layers=4)
    with pytest.raises(DataError, match="the target is a text model"):
        train(tmp_path, tokens, init=str(checkpoint))


def test_images_of_other_patches_and_foreign_tokens_are_refused(tokens, tmp_path):
    other = make_checkpoint("qwen3_vl", tmp_path / "patches", vocab_size=600, vision={"patch_size": 2})
    with pytest.raises(DataError, match="patch_dim 96, and the target's is 24"):
        train(tmp_path, tokens, init=str(other))
    small = make_checkpoint("qwen3_vl", tmp_path / "small")
    with pytest.raises(DataError, match="they need 600 embeddings, and the target has 400"):
        train(tmp_path, tokens, init=str(small))


def test_a_rate_for_a_part_that_the_target_lacks_is_refused(texts, tmp_path):
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", vocab_size=600, num_hidden_layers=4)
    with pytest.raises(ConfigError, match="lr_vision: a qwen3 target has no such part"):
        train(tmp_path, texts, init=str(checkpoint), lr_vision=1e-4)


def test_a_fine_tuned_target_of_another_family_is_measured_too(texts, tmp_path):
    sizes = {"head_dim": 16, "lru_width": 64, "attention_window_size": 64, "vocab_size": 600}
    checkpoint = any_checkpoint("recurrent_gemma", tmp_path / "checkpoint", **sizes)
    stage = train(tmp_path / "tuned", texts, init=str(checkpoint), steps=1, batch_size=2, lr=1e-3)
    target = stage.artifact(TargetModel)
    stated = TargetStated.read(target.path, target.digest)
    assert "padded batches give what single texts give" in stated.unbatched_reason
    assert "measured on a small random copy" in stated.verifying_mistake
    assert "padding" in read_json(target.path / "target.json")["fails"]


def test_a_mask_token_of_its_own_takes_the_place_of_that_of_the_tokens(texts, tmp_path):
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", vocab_size=600, num_hidden_layers=1)
    stage = train(tmp_path / "tuned", texts, init=str(checkpoint), steps=1, batch_size=2, mask_token_id=599)
    assert 599 == read_json(stage.artifact(TargetModel).path / "target.json")["mask_token_id"]
