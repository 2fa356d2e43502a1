"""Targets whose files hold other weights than their config says: quantised, with tensors too many, with two heads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from any_targets import any_checkpoint
from fake_stage import FakeStage
from family_checkpoints import HIDDEN, VOCABULARY, make_checkpoint
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.target import fetch, stored_weights
from ops.lib.target.checkpoint_files import CONFIGS
from ops.lib.target.embedding_and_head import frozen_ends
from ops.lib.target.model import Target, target_info
from ops.lib.target.quantised import FILES
from ops.lib.vision.families import family_of
from ops.load_target.op import LoadTarget
from ops.load_target.plan import missing_here
from ops.load_target.run import load_target

EMBEDDINGS = {
    "qwen3": "model.embed_tokens.weight",
    "qwen2_5_vl": "model.embed_tokens.weight",
    "qwen3_vl": "model.language_model.embed_tokens.weight",
    "qwen3_5": "model.language_model.embed_tokens.weight",
}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of a family, made once."""
    folder = tmp_path_factory.mktemp("made")
    return lambda name: folder / name if (folder / name).exists() else make_checkpoint(name, folder / name)


@pytest.fixture
def copy(made, tmp_path):
    return lambda name: shutil.copytree(made(name), tmp_path / "checkpoint")


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, **changes):
    """Replace or add tensors; dots of their names as __."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refusal(folder):
    """What plan says, which is what the stage says."""
    (text,) = missing_here(LoadTarget(checkpoint=str(folder))).values()
    with pytest.raises(DataError) as caught:
        load_target(LoadTarget(checkpoint=str(folder)), FakeStage(folder.parent / "refused"))
    assert text == str(caught.value)
    return text.replace(str(folder), "TARGET")


def load(folder) -> TargetModel:
    stage = FakeStage(folder.parent / "stage")
    load_target(LoadTarget(checkpoint=str(folder)), stage)
    return stage.artifact(TargetModel)


SCALE, CODES = torch.ones(1), torch.zeros(HIDDEN, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("settings", "tensors", "sign"),
    [
        ({"quantization_config": {"quant_method": "quanto"}}, {}, "quantization_config of config.json: 'quanto'"),
        ({"quantization_config": {"quant_algo": "FP8"}}, {}, "quantization_config of config.json: 'FP8'"),
        ({"compression_config": {"format": "x"}}, {}, "compression_config of config.json"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            {},
            "quantization_config of config.json: 'bitsandbytes'",
        ),
        ({}, {"weight": torch.zeros(HIDDEN, 64).to(torch.float8_e4m3fn)}, f"{DOWN}.weight of dtype F8_E4M3"),
        ({}, {"weight_scale_inv": SCALE}, f"{DOWN}.weight_scale_inv"),
        ({}, {"input_scale": SCALE}, f"{DOWN}.input_scale"),
        ({}, {"qweight": CODES}, f"{DOWN}.qweight of dtype I32"),
        ({}, {"qzeros": SCALE}, f"{DOWN}.qzeros"),
        ({}, {"weight__absmax": SCALE}, f"{DOWN}.weight.absmax"),
        ({}, {"weight_packed": CODES.to(torch.uint8)}, f"{DOWN}.weight_packed of dtype U8"),
    ],
)
def test_quantised_weights_are_refused_by_what_shows_them(copy, settings, tensors, sign):
    folder = copy("qwen3")
    change_config(folder, lambda config: config.update(settings))
    change_tensors(folder, **{f"{DOWN.replace('.', '__')}__{name}": value for name, value in tensors.items()})
    assert refusal(folder) == (
        f"TARGET: quantised weights ({sign}), and of those only fp8, mxfp4, awq, gptq, compressed-tensors are taken, "
        "as quant_method of quantization_config in config.json; use the checkpoint that it was quantised from"
    )


# Sizes of a Gemma 4 with experts, whose published tensors have scales of their own.
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 400,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}


def test_scales_that_a_model_has_of_its_own_are_no_quantisation(tmp_path):
    folder = any_checkpoint("gemma4_text", tmp_path / "checkpoint", **GEMMA4)
    names = {name.rpartition("layers.0.")[2] for name in load_file(folder / "model.safetensors")}
    assert {"router.scale", "router.per_expert_scale", "router.proj.weight", "layer_scalar"} <= names
    Target.load(load(folder))
    others = ("vision_tower.std_scale", "audio_tower.layers.0.self_attn.per_dim_scale", "altup.correct_output_scale")
    names = (*others, "model.layers.0.hc_scale", "hc_head.scale")
    change_tensors(folder, **{name: SCALE.clone() for name in names})
    change_tensors(folder, position_ids=torch.arange(4), **{"model.layers.0.attention.bias": torch.ones(4, 4).bool()})
    assert {} == missing_here(LoadTarget(checkpoint=str(folder)))
    change_tensors(folder, **{"model.layers.0.router.proj.weight": CODES.to(torch.int8)})
    assert "layers.0.router.proj.weight of dtype I8)" in refusal(folder)
    change_tensors(folder, **{"model.layers.0.router.proj.scale": SCALE})
    assert "layers.0.router.proj.scale, model.layers.0.router.proj.weight of dtype I8)" in refusal(folder)


def test_quantisation_that_only_the_text_config_names_is_refused(copy):
    folder = copy("qwen3_vl")
    change_config(folder, lambda config: config["text_config"].update(quantization_config={"quant_method": "fp8"}))
    assert "quantised weights (text_config.quantization_config of config.json: 'fp8')" in refusal(folder)


def test_a_store_that_holds_a_quantised_target_is_refused_when_it_is_loaded(copy):
    target = load(copy("qwen3"))
    change_tensors(target.path / "model", **{f"{DOWN.replace('.', '__')}__weight_scale": SCALE})
    with pytest.raises(DataError, match=rf"quantised weights \({DOWN}.weight_scale\), and of those only fp8"):
        Target.load(target)


@pytest.mark.parametrize("name", [f"{DOWN}.lora", "model.layers.8.mlp.down_proj.weight", "lm_head.values"])
def test_tensors_of_a_part_that_the_model_has_no_place_for_are_refused(copy, name):
    folder = copy("qwen3")
    change_tensors(folder, **{name: SCALE})
    assert refusal(folder) == (
        f"TARGET: the files hold tensors that the model of config.json does not have: {name}; use the config.json that "
        "belongs to these files, or remove them"
    )


def test_tensors_that_only_transformers_misses_are_refused_when_the_target_is_loaded(copy):
    folder = copy("qwen3")
    change_tensors(folder, **{"model.layers.2.self_attn.q_proj.bias": torch.ones(HIDDEN), "value_head.weight": SCALE})
    with pytest.raises(DataError, match=r"does not have: model.layers.2.self_attn.q_proj.bias; use the config.json"):
        Target.load(load(folder))


def test_parts_that_the_model_does_not_compute_with_may_be_in_the_files(copy):
    folder = copy("qwen3_5")
    others = ("mtp.layers.0.mlp.down_proj.weight", "value_head.weight", "model.layers.0.rotary_emb.inv_freq")
    change_tensors(folder, **{name: SCALE.clone() for name in others})
    assert 8 == len(Target.load(load(folder)).decoder_layers)


def test_a_quantised_model_id_is_refused_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    asked = []

    def snapshot(_model_id, *, revision, allow_patterns):
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "hqq"}}')
        return str(tmp_path)

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    with pytest.raises(DataError, match=r"quantised weights \(quantization_config of config.json: 'hqq'\)"):
        fetch.find_checkpoint("owner/name-HQQ", "0a" * 20)
    assert [[*CONFIGS, *FILES]] == asked


def tie_at_the_top(config):
    config["tie_word_embeddings"] = True


def tie_in_the_text_config(config):
    config.pop("tie_word_embeddings", None)
    config["text_config"]["tie_word_embeddings"] = True


def tie_at_the_top_against_the_text_config(config):
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = False


def no_tie_at_all(config):
    config.pop("tie_word_embeddings", None)
    config.get("text_config", {}).pop("tie_word_embeddings", None)


def no_tie_against_the_text_config(config):
    config["tie_word_embeddings"] = False
    config["text_config"]["tie_word_embeddings"] = True


TIES = [(name, tie_at_the_top) for name in EMBEDDINGS]
TIES += [
    (name, how)
    for name in EMBEDDINGS
    if name != "qwen3"
    for how in (tie_in_the_text_config, tie_at_the_top_against_the_text_config)
]
NO_TIES = [(name, no_tie_at_all) for name in EMBEDDINGS]
NO_TIES += [(name, no_tie_against_the_text_config) for name in EMBEDDINGS if name != "qwen3"]


def other_head():
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "change"), TIES)
def test_a_tied_target_whose_files_hold_another_head_is_refused(copy, name, change):
    folder = copy(name)
    change_config(folder, change)
    (embedding,) = [key for key in load_file(folder / "model.safetensors") if key.endswith("embed_tokens.weight")]
    change_tensors(folder, **{"lm_head.weight": other_head()})
    assert refusal(folder) == (
        f"TARGET: config.json sets tie_word_embeddings, but lm_head.weight differs from {embedding}; set "
        "tie_word_embeddings = false if lm_head.weight is the head, or remove that tensor"
    )


@pytest.mark.parametrize(("name", "change"), NO_TIES)
def test_a_target_that_no_config_ties_has_the_head_of_its_files_everywhere(copy, name, change):
    folder = copy(name)
    change_config(folder, change)
    assert "none of the tensors end in lm_head.weight, and config.json does not set tie" in refusal(folder)
    change_tensors(folder, **{"lm_head.weight": other_head()})
    agree(load(folder), tied=False)


@pytest.mark.parametrize(("name", "change"), TIES)
def test_a_tied_target_has_the_embedding_as_its_head_everywhere(copy, name, change):
    folder = copy(name)
    change_config(folder, change)
    agree(load(folder), tied=True)


def agree(target: TargetModel, tied: bool) -> None:
    """transformers runs, the training uses and SGLang, which reads the top level, serves one head."""
    embed, head = frozen_ends(target)
    assert torch.equal(Target.load(target).head_weight, head.weight_VM)
    assert tied == torch.equal(embed, head.weight_VM) == target_info(target)["tied"]
    config = json.loads((target.path / "model" / "config.json").read_text())
    assert tied == config.get("tie_word_embeddings", False) == family_of(config).tied


def test_a_head_in_another_shard_is_compared_to_its_last_byte(copy, monkeypatch):
    monkeypatch.setattr(stored_weights, "CHUNK", 1000)  # many parts of the 51,200 bytes
    folder = copy("qwen3")
    tensors = load_file(folder / "model.safetensors")
    (embedding,) = [key for key in tensors if key.endswith("embed_tokens.weight")]
    head = tensors[embedding].clone()
    save_file(tensors, folder / "first.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    places = {**dict.fromkeys(tensors, "first.safetensors"), "lm_head.weight": "second.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    save_file({"lm_head.weight": head}, folder / "second.safetensors", {"format": "pt"})
    agree(load(folder), tied=True)
    head[-1, -1] += 1
    save_file({"lm_head.weight": head}, folder / "second.safetensors", {"format": "pt"})
    assert "lm_head.weight differs from" in refusal(folder)
    save_file({"lm_head.weight": head.double()}, folder / "second.safetensors", {"format": "pt"})
    assert "lm_head.weight differs from" in refusal(folder)


def test_the_head_is_that_of_the_files_that_transformers_loads(copy):
    folder = copy("qwen3")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "other.safetensors", {"format": "pt"})
    agree(load(folder), tied=True)
