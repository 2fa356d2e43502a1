"""A target's directory is one of which SGLang makes the same model, whatever transformers left out when it wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_stage import FakeStage
from family_checkpoints import FAMILIES, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.target.model import Target, check_served, complete_config, describe_target, read_config, target_info
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target


def load(checkpoint: Path, folder: Path) -> TargetModel:
    stage = FakeStage(folder)
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    return stage.artifact(TargetModel)


def edit(checkpoint: Path, part: str, **changes: Any) -> None:
    """Change fields of a part of config.json; None removes one."""
    config = read_config(checkpoint)
    fields = config[part] | changes
    config[part] = {name: value for name, value in fields.items() if value is not None}
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.fixture
def qwen3_5(tmp_path):
    return make_checkpoint("qwen3_5", tmp_path / "checkpoint", num_hidden_layers=4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_as_it_is_published_is_copied_byte_for_byte(name, tmp_path):
    tied = name != "qwen3_moe"
    checkpoint = make_checkpoint(name, tmp_path / "checkpoint", num_hidden_layers=4, tie_word_embeddings=tied)
    check_served(checkpoint)
    target = load(checkpoint, tmp_path / "stage")
    assert (checkpoint / "config.json").read_bytes() == (target.path / "model" / "config.json").read_bytes()


def test_what_transformers_leaves_out_of_a_qwen3_5_it_made_itself_is_written_into_the_target(qwen3_5, tmp_path):
    published = read_config(qwen3_5)
    edit(qwen3_5, "text_config", layer_types=None, full_attention_interval=None)
    edit(qwen3_5, "vision_config", deepstack_visual_indexes=None)
    AutoConfig.from_pretrained(qwen3_5).save_pretrained(qwen3_5)
    left_out = read_config(qwen3_5)
    assert "full_attention_interval" not in left_out["text_config"]
    assert "deepstack_visual_indexes" not in left_out["vision_config"]
    with pytest.raises(
        DataError, match=r"misread text_config.full_attention_interval, vision_config.deepstack_visual_indexes: miss"
    ):
        check_served(qwen3_5)
    target = load(qwen3_5, tmp_path / "stage")
    check_served(target.path / "model")
    written = read_config(target.path / "model")
    for part in ("text_config", "vision_config"):
        assert published[part] == written[part]
    assert target_info(target)["num_layers"] == len(Target.load(target).decoder_layers)


def test_the_rotary_share_is_the_one_that_transformers_goes_by(qwen3_5):
    rope = read_config(qwen3_5)["text_config"]["rope_parameters"] | {"partial_rotary_factor": 0.5}
    edit(qwen3_5, "text_config", rope_parameters=rope)
    with pytest.raises(DataError, match=r"misread text_config.partial_rotary_factor: missing, or not"):
        check_served(qwen3_5)
    complete_config(qwen3_5)
    check_served(qwen3_5)
    assert 0.5 == read_config(qwen3_5)["text_config"]["partial_rotary_factor"]


@pytest.mark.parametrize(
    "kinds", [["linear_attention"] * 4, ["full_attention"] * 4, ["linear_attention"] * 3 + ["full_attention"]]
)
def test_the_interval_is_read_from_the_kinds_of_layers(qwen3_5, kinds):
    edit(qwen3_5, "text_config", layer_types=kinds, full_attention_interval=None)
    complete_config(qwen3_5)
    interval = read_config(qwen3_5)["text_config"]["full_attention_interval"]
    assert kinds == ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(4)]


def test_layers_without_an_interval_are_refused_where_sglang_would_serve_them(qwen3_5):
    edit(qwen3_5, "text_config", layer_types=["full_attention", *["linear_attention"] * 3])
    complete_config(qwen3_5)
    with pytest.raises(DataError, match="layer_types does not repeat at an interval, which SGLang requires"):
        check_served(qwen3_5)


def test_a_tied_head_is_refused_where_sglang_would_serve_a_random_one(tmp_path):
    checkpoint = make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=4)
    with pytest.raises(DataError, match="SGLang's Qwen3-MoE does not support a tied head"):
        check_served(checkpoint)
    check_served(make_checkpoint("qwen3", tmp_path / "dense", num_hidden_layers=4))


def test_a_qwen3_5_of_text_alone_is_completed_as_well(qwen3_5):
    text = read_config(qwen3_5)["text_config"]
    del text["full_attention_interval"]
    (qwen3_5 / "config.json").write_text(json.dumps(text))
    with pytest.raises(DataError, match="SGLang would misread full_attention_interval: missing"):
        check_served(qwen3_5)
    complete_config(qwen3_5)
    check_served(qwen3_5)
    assert text | {"full_attention_interval": 4} == read_config(qwen3_5)


def test_a_qwen3_5_that_lost_its_vision_config_is_refused_where_sglang_would_make_one_up(qwen3_5):
    config = read_config(qwen3_5)
    del config["vision_config"]
    (qwen3_5 / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="a qwen3_5 without vision_config, which SGLang would load with a"):
        check_served(qwen3_5)


def test_experts_that_transformers_turned_around_are_refused_with_the_shape_that_sglang_wants(tmp_path):
    checkpoint = make_checkpoint("qwen3_vl_moe", tmp_path / "checkpoint", num_hidden_layers=4)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    model.save_pretrained(checkpoint)
    with pytest.raises(DataError, match=r"experts.down_proj is \[4, 32, 24\], but SGLang expects \[4, 24, 32\]"):
        check_served(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    turned = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in weights.items()}
    save_file(turned, checkpoint / "model.safetensors", {"format": "pt"})
    check_served(checkpoint)
    again = AutoModelForImageTextToText.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_square_experts_are_refused_because_nobody_could_tell_which_way_round_they_lie(tmp_path):
    checkpoint = make_checkpoint("qwen3_vl_moe", tmp_path / "checkpoint", num_hidden_layers=4, moe_intermediate_size=16)
    with pytest.raises(DataError, match="moe_intermediate_size 16 makes square matrices with a hidden_size of 32"):
        describe_target(checkpoint, 7, [2])


def test_a_qwen3_vl_with_experts_has_three_deepstack_layers_where_sglang_would_serve_it(tmp_path):
    vision = {"depth": 2, "deepstack_visual_indexes": [0, 1]}
    checkpoint = make_checkpoint("qwen3_vl_moe", tmp_path / "checkpoint", vision=vision, num_hidden_layers=4)
    with pytest.raises(DataError, match=r"deepstack_visual_indexes \[0, 1\]: SGLang supports only three"):
        check_served(checkpoint)
