"""Targets from checkpoint directories, whole and damaged."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from fake_stage import FakeStage
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.load_target.ends import frozen_ends
from ops.load_target.model import Target, describe_target, target_info, text_config
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.load_target.save import copy_files


@pytest.fixture
def checkpoint(target, tmp_path):
    """A copy of a Qwen3-VL checkpoint directory, to be damaged."""
    return shutil.copytree(target.path / "model", tmp_path / "checkpoint")


def load(checkpoint, tmp_path, **changes) -> TargetModel:
    stage = FakeStage(tmp_path / "stage")
    load_target(LoadTarget(checkpoint=str(checkpoint), **changes), stage)
    return stage.artifact(TargetModel)


def edit_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_checkpoint_directory_becomes_the_same_target(target, checkpoint, tmp_path):
    loaded = load(checkpoint, tmp_path)
    assert target_info(target) == target_info(loaded)
    assert text_config(target) == text_config(loaded)
    before, after = Target.load(target).model.state_dict(), Target.load(loaded).model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_code_and_pickles_in_a_checkpoint_stay_behind(checkpoint, tmp_path):
    (checkpoint / "modeling_custom.py").write_text("raise SystemExit")
    (checkpoint / "pytorch_model.bin").write_bytes(b"pickle")
    loaded = load(checkpoint, tmp_path)
    assert [file.name for file in (loaded.path / "model").iterdir() if file.suffix in (".py", ".bin")] == []


def test_a_text_only_qwen3_is_a_target_with_an_untied_head(target, tmp_path):
    config = Qwen3Config(
        vocab_size=600,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "qwen3")
    copy_files(target.path / "model", tmp_path / "qwen3", ("tokenizer*", "chat_template*"))
    loaded = load(tmp_path / "qwen3", tmp_path, mask_token_id=7)
    info = target_info(loaded)
    assert (
        info["model_type"],
        info["vision"],
        info["embed_key"],
        info["lm_head_key"],
        info["tied"],
        info["mask_token_id"],
        info["eos_token_ids"],
    ) == ("qwen3", False, "model.embed_tokens.weight", "lm_head.weight", False, 7, [2])
    embed, head = frozen_ends(loaded)
    assert torch.equal(model.model.embed_tokens.weight, embed)
    assert torch.equal(model.lm_head.weight, head)
    assert len(Target.load(loaded).decoder_layers) == 4


def test_a_directory_without_config_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no config\.json"):
        load(tmp_path / "empty", tmp_path)


def test_a_broken_config_names_line_and_column(checkpoint, tmp_path):
    (checkpoint / "config.json").write_text('{"a": 1,\n "b": }')
    with pytest.raises(DataError, match=r"config\.json:2:7: not valid JSON"):
        load(checkpoint, tmp_path)


def test_a_family_that_is_not_supported_is_refused(checkpoint, tmp_path):
    edit_config(checkpoint, model_type="llama")
    with pytest.raises(DataError, match=r"model_type 'llama' is not supported; known are qwen3_vl, qwen3"):
        load(checkpoint, tmp_path)


def test_a_file_is_no_checkpoint(checkpoint, tmp_path):
    with pytest.raises(DataError, match="is a file; a checkpoint is the directory"):
        load(checkpoint / "config.json", tmp_path)


def test_damaged_weights_name_the_file(checkpoint, tmp_path):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"checkpoint/model\.safetensors: damaged or cut short"):
        load(checkpoint, tmp_path)


def test_a_directory_without_safetensors_is_refused(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"no \*\.safetensors"):
        load(checkpoint, tmp_path)


def test_a_missing_head_of_an_untied_model_is_refused(checkpoint, tmp_path):
    edit_config(checkpoint, tie_word_embeddings=False)
    with pytest.raises(DataError, match=r"no lm_head\.weight"):
        load(checkpoint, tmp_path)


def test_several_embeddings_are_listed(checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["other.embed_tokens.weight"] = torch.zeros(2, 2)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(DataError, match=r"expected one embed_tokens tensor, found \[.*other\.embed_tokens\.weight"):
        load(checkpoint, tmp_path)


def test_a_tied_target_ignores_a_stale_head(target, checkpoint, tmp_path):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(600, 128)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    loaded = load(checkpoint, tmp_path)
    assert target_info(target) == target_info(loaded)
    assert torch.equal(frozen_ends(target)[1], frozen_ends(loaded)[1])


def test_a_target_without_a_mask_token_is_refused(target):
    with pytest.raises(DataError, match="no mask token is known"):
        describe_target(target.path / "model", None, [2])


def test_a_mask_token_outside_the_vocabulary_is_refused(target):
    with pytest.raises(DataError, match="mask_token_id 600 lies outside the vocabulary of 600"):
        describe_target(target.path / "model", 600, [2])


def test_a_name_that_is_neither_a_directory_nor_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="neither a directory here nor a model"):
        load("nobody/no-such-model", tmp_path)


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint, tmp_path):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load(checkpoint, tmp_path)
