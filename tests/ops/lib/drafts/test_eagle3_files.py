"""Folders that hold no EAGLE-3 draft for a target are refused by their config.json and headers."""

from __future__ import annotations

import re

import pytest
import torch
from eagle3_cases import V, eagle3_folder
from safetensors.torch import load_file, save_file

from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.decoding.eagle3_files import eagle3_mistake

TARGET = {"hidden_size": 32, "vocab_size": V, "num_layers": 8}
TOKENS = range(0, V, 3)
IDS = "eagle_aux_hidden_state_layer_ids"


def with_tensor(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


@pytest.mark.parametrize("given", [{}, {"tokens": TOKENS}, {"tokens": range(V), "has_embedding": True}, {"ids": None}])
def test_published_forms_are_taken(tmp_path, given):
    assert "" == eagle3_mistake(eagle3_folder(tmp_path / "eagle3", **given), TARGET)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"its architectures are \['LlamaForCausalLM'\]"),
        ({"architectures": None}, "its architectures are None"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2, a variant"),
        ({"norm_before_residual": True}, "norm_before_residual = True, a variant"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}, "rope_type = 'mrope', a variant"),
        ({IDS: [1, 3, 4]}, rf"{IDS} = \[1, 3, 4\], a variant"),
        ({"num_aux_hidden_states": 4}, r"other sizes than config.json: fc.weight \[32, 96\]"),
        ({"hidden_size": 64}, "its hidden_size is 64, and the target's 32: it is the draft of another target"),
        ({"target_hidden_size": 64}, "its hidden_size is 64, and the target's 32"),
        ({"vocab_size": 500}, "its vocab_size is 500, and the target's 400"),
        ({"ids": [0, 2, 7]}, "reads the layers 0, 2, 7: of a target of 8 layers, ascending ones from 0 to 6"),
        ({"ids": [2, 0, 5]}, "reads the layers 2, 0, 5"),
        ({"ids": ["0"]}, "and no list of layers"),
    ],
)
def test_a_config_of_another_draft_is_refused(tmp_path, given, words):
    assert re.search(words, eagle3_mistake(eagle3_folder(tmp_path / "eagle3", **given), TARGET))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if n != "fc.weight"}, "lack fc.weight of an EAGLE-3 draft"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != "d2t"}, "lack d2t of an EAGLE-3 draft"),
        (lambda tensors: tensors | {"input_norm.weight": torch.ones(96)}, "has no input_norm.weight"),
        (with_tensor("d2t", lambda d2t: d2t + 2), "gives tokens from 2 to 401, outside the vocabulary of 400"),
        (with_tensor("d2t", lambda d2t: d2t - 3 * torch.arange(len(d2t))), "gives one token of the target for two"),
        (with_tensor("d2t", lambda d2t: d2t.float()), "no tensor of whole numbers, but F32"),
        (with_tensor("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn)), r"are quantised \(fc.weight\)"),
    ],
)
def test_tensors_of_another_draft_are_refused(tmp_path, change, words):
    folder = eagle3_folder(tmp_path / "eagle3", tokens=TOKENS)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    assert re.search(words, eagle3_mistake(folder, TARGET))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intermediate_size": 40}, "other sizes than config.json: layers.0.mlp.down_proj.weight [32, 48]"),
        ({"num_key_value_heads": "2"}, "needs positive whole numbers, and has num_key_value_heads = '2'"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors_are_refused(tmp_path, change, words):
    folder = eagle3_folder(tmp_path / "eagle3")
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    assert words in eagle3_mistake(folder, TARGET)


def test_a_head_that_sglang_would_replace_a_pickle_and_a_folder_without_a_draft_are_refused(tmp_path):
    folder = eagle3_folder(tmp_path / "eagle3", tokens=TOKENS)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {name: value for name, value in config.items() if name != "draft_vocab_size"})
    save_file(
        {n: t for n, t in load_file(folder / "model.safetensors").items() if n != "d2t"}, folder / "model.safetensors"
    )
    assert "replace it by the target's: set draft_vocab_size" in eagle3_mistake(folder, None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "save their tensors again as model.safetensors" in eagle3_mistake(folder, None)
    (folder / "pytorch_model.bin").unlink()
    assert "no *.safetensors" in eagle3_mistake(folder, None)
    assert eagle3_mistake(folder / "config.json", None)
