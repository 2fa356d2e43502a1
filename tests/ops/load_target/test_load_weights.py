"""A target's weights on their way from files to the device: whose memory they take, and in which dtype they arrive."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from any_targets import any_checkpoint
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.data.files import read_json, write_json
from ops.lib.target import model as target_module
from ops.lib.target.embedding_and_head import frozen_ends, stored_dtype
from ops.lib.target.model import Target, describe_target, place_weights, target_info
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target


def load(checkpoint, tmp_path, **changes) -> TargetModel:
    stage = FakeStage(tmp_path / "stage")
    load_target(LoadTarget(checkpoint=str(checkpoint), **changes), stage)
    return stage.artifact(TargetModel)


def stored_as(folder, dtype):
    """The checkpoint's floating tensors in another dtype."""
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "stored", "wanted"),
    [
        ("qwen3", torch.float32, torch.bfloat16),
        ("qwen3_5", torch.bfloat16, torch.float32),
        ("qwen2_5_vl", torch.float32, torch.bfloat16),
        ("qwen3_vl_moe", torch.bfloat16, torch.float32),
    ],
)
def test_weights_are_cast_as_transformers_casts_them_and_what_a_model_computes_stays(name, stored, wanted, tmp_path):
    folder = make_checkpoint(name, tmp_path / "checkpoint")
    info = target_info(load(folder, tmp_path / "stage"))
    stored_as(folder, stored)
    assert stored_dtype(folder) == stored
    loaded = Target.from_directory(folder, info, dtype=wanted)
    whole = loaded.family.auto_class.from_pretrained(folder, dtype=wanted)
    here, there = (dict(model.named_parameters()) | dict(model.named_buffers()) for model in (loaded.model, whole))
    assert {key: tensor.dtype for key, tensor in here.items()} == {key: tensor.dtype for key, tensor in there.items()}
    assert wanted in {tensor.dtype for tensor in here.values()}
    assert all(torch.equal(tensor, there[key]) for key, tensor in here.items())


def in_files(tensors):
    """Whether each tensor lies in the pages of a file of weights, which all processes of a machine share."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    return [any(start <= tensor.data_ptr() < end for start, end in ranges) for tensor in tensors]


def test_a_rank_takes_no_host_memory_for_weights_that_are_not_yet_on_its_device(tmp_path, monkeypatch):
    folder = make_checkpoint("qwen3_vl", tmp_path / "checkpoint")
    info = target_info(load(folder, tmp_path / "stage"))
    stored_as(folder, torch.bfloat16)
    assert stored_dtype(folder) == torch.bfloat16
    seen = {}

    def watched(loaded, device, dtype):
        seen["before"] = in_files(loaded.parameters())
        place_weights(loaded, device, dtype)
        seen["after"] = in_files(loaded.parameters())

    monkeypatch.setattr(target_module, "place_weights", watched)
    Target.from_directory(folder, info, dtype=torch.float32)
    assert all(seen["before"])
    assert not any(seen["after"])
    monkeypatch.undo()
    embed, head = frozen_ends(load(folder, tmp_path / "ends"), "meta")
    assert {"meta"} == {embed.device.type, head.weight_VM.device.type}


def test_a_checkpoint_of_several_dtypes_is_loaded_in_the_one_that_is_asked_for(tmp_path):
    folder = make_checkpoint("qwen3", tmp_path / "checkpoint")
    info = target_info(load(folder, tmp_path / "stage"))
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    rounded = {name: value.bfloat16() if value.ndim == 2 else value for name, value in tensors.items()}
    save_file(rounded, file, {"format": "pt"})
    assert stored_dtype(folder) is None
    model = Target.from_directory(folder, info).model
    norm = next(name for name, value in tensors.items() if value.ndim == 1)
    assert torch.equal(tensors[norm], dict(model.named_parameters())[norm])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"intermediate_size": 80},
            r"other sizes than the llama of config\.json: model\.layers\.0\.mlp\.down_proj\.weight \[64, 96\] \(by "
            r"config\.json \[64, 80\]\), .* and 15 more; copy config\.json again",
        ),
        (
            {"num_hidden_layers": 7},
            r"the files lack model\.layers\.6\..* is the checkpoint complete, and of .* llama\?",
        ),
        (
            {"model_type": "opt"},
            r"the files lack model\.decoder\..* they have model\.embed_tokens\.weight, .* instead: the model_type opt "
            r"of config\.json is probably not theirs; copy config\.json again",
        ),
        ({"hidden_act": "unheard"}, r"transformers cannot load it: KeyError: 'unheard'; copy config\.json again"),
    ],
)
def test_files_of_another_model_than_config_json_names_are_refused_in_a_line(tmp_path, fields, expected):
    folder = any_checkpoint("llama", tmp_path / "checkpoint")
    info = describe_target(folder, 7, [3])
    write_json(folder / "config.json", read_json(folder / "config.json") | fields)
    with pytest.raises(DataError, match=expected) as caught:
        Target.from_directory(folder, info)
    assert "\n" not in str(caught.value)


def test_what_transformers_says_while_it_loads_has_no_codes_for_terminals(tmp_path, caplog):
    bold, red, end = "\x1b[1m", "\x1b[38;5;196m", "\x1b[0m"

    def load(_directory):
        logging.getLogger("transformers.modeling_utils").warning("%sREPORT%s\nmissing", bold, end)
        raise ValueError(f"{red}MISSING{end}\n  weights")

    with pytest.raises(DataError, match=r"ValueError: MISSING weights; copy config\.json again"):
        target_module._loaded(tmp_path, load)
    assert ["REPORT\nmissing"] == caplog.messages
    caplog.clear()
    logging.getLogger("transformers.modeling_utils").warning("%sbefore", bold)
    assert [f"{bold}before"] == caplog.messages
