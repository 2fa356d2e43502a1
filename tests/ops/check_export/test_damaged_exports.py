"""Every damaged export fails at the gate, with what SGLang would do and the remedy: its files and its tensors."""

from __future__ import annotations

import re

import pytest
import torch
from damaged_cases import RANDOM, REWRITE, edit_config, edit_tensors, mistakes
from safetensors.torch import load_file, save_file


def rename(table, old, new):
    table[new] = table.pop(old)


def swapped(weights, one, other):
    for name in [name for name in weights if one in name]:
        twin = name.replace(one, other)
        weights[name], weights[twin] = weights[twin], weights[name]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda weights: swapped(weights, "k_proj", "v_proj"), id="keys for values"),
        pytest.param(lambda weights: swapped(weights, "layers.0.", "layers.1."), id="layers"),
        pytest.param(lambda weights: [tensor.zero_() for tensor in weights.values()], id="zeros"),
        pytest.param(lambda weights: [tensor.normal_() for tensor in weights.values()], id="by chance"),
        pytest.param(lambda weights: weights["norm.weight"][:1].mul_(1.5), id="one number"),
    ],
)
def test_other_weights_of_the_right_shapes_are_told(tmp_path, damaged, change):
    edit_tensors(damaged, change)
    [(what, sglang, remedy)] = mistakes(tmp_path, damaged)
    assert re.fullmatch(
        r"model\.safetensors: the tensors are not those of the export: \w{12}, but dflow\.digest\.tensors is \w{12}",
        what,
    )
    assert "silently loads what fits by name and shape" in sglang and REWRITE in remedy


def as_directory(file):
    file.unlink()
    file.mkdir()


def as_link(file):
    """To a name beside it, where the content lies under another one than that of the contract."""
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to("../elsewhere")


def as_dangling_link(file):
    file.unlink()
    file.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
@pytest.mark.parametrize("change", [as_directory, as_link, as_dangling_link])
def test_what_is_no_plain_file_is_told_and_not_shipped(tmp_path, damaged, name, change):
    change(damaged["draft"].path / name)
    [(what, sglang, remedy)] = mistakes(tmp_path, damaged)
    assert f"{name}: is not a regular file but {'a directory' if change is as_directory else 'a link'}" == what
    assert "follows a link that is wrong" in sglang and REWRITE in remedy


def test_a_card_that_is_no_text_is_told(tmp_path, damaged):
    (damaged["draft"].path / "README.md").write_bytes(b"\xff\xfe\x00")
    [(what, _, _)] = mistakes(tmp_path, damaged)
    assert what.startswith("README.md: cannot be read as text in UTF-8 (")


def test_every_missing_tensor_is_told_by_its_name(tmp_path, damaged):
    file = damaged["draft"].path / "model.safetensors"
    whole = load_file(file)
    for name in whole:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, file)
        [(what, sglang, remedy)] = mistakes(tmp_path, damaged)
        assert f"model.safetensors: {name} is missing" == what
        assert RANDOM in sglang and REWRITE in remedy
    assert 25 == len(whole)


@pytest.mark.parametrize(
    ("change", "what", "sglang", "remedy"),
    [
        (
            lambda weights: weights.update({"fc.weight": torch.zeros(128, 256)}),
            "fc.weight must be [128, 640], got [128, 256]",
            "refuses to start (ValueError: fc.weight",
            REWRITE,
        ),
        (
            lambda weights: weights.update({"norm.weight": torch.zeros(64)}),
            "norm.weight must be [128], got [64]",
            "stops while loading the weights",
            REWRITE,
        ),
        (
            lambda weights: weights.update({"lm_head.weight": torch.zeros(600, 128)}),
            "lm_head.weight does not belong here",
            "silently ignores an unknown tensor",
            REWRITE,
        ),
        (
            lambda weights: rename(weights, "fc.weight", "model.fc.weight"),
            '1 names begin with "model." (model.fc.weight)',
            "accepts the prefix; the reference implementation does not",
            REWRITE,
        ),
        (
            lambda weights: [rename(weights, name, f"model.{name}") for name in list(weights)],
            '25 names begin with "model." (model.fc.weight, model.hidden_norm.weight',
            "accepts the prefix; the reference implementation does not",
            REWRITE,
        ),
        (
            lambda weights: weights.update({"norm.weight": weights["norm.weight"].half()}),
            "norm.weight must be of dtype F32, got F16",
            "silently casts it to the server's dtype",
            REWRITE,
        ),
        (
            lambda weights: weights["fc.weight"].view(-1)[3:5].fill_(float("nan")),
            "fc.weight has 2 non-finite values of 81920",
            "about 1 token a step is accepted",
            "train again",
        ),
    ],
)
def test_wrong_tensors_are_told_with_what_sglang_does_and_the_remedy(tmp_path, damaged, change, what, sglang, remedy):
    edit_tensors(damaged, change)
    [(told, does, todo)] = mistakes(tmp_path, damaged)
    assert told.startswith(f"model.safetensors: {what}")
    assert sglang in does and remedy in todo


@pytest.mark.parametrize(
    ("name", "sglang"),
    [
        ("mask_embedding.pt", "overwrites the target's embedding of the mask token"),
        ("model-00002.safetensors", "may load it instead of, or over, the draft's own weights"),
        ("dflash.py", "may read it"),
    ],
)
def test_a_stray_file_is_told(tmp_path, damaged, name, sglang):
    (damaged["draft"].path / name).write_bytes(b"")
    [(what, does, remedy)] = mistakes(tmp_path, damaged)
    assert (f"{name}: does not belong here", "what to do: remove the file") == (what, remedy)
    assert sglang in does


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_a_missing_file_is_told(tmp_path, damaged, name):
    (damaged["draft"].path / name).unlink()
    assert [f"{name}: is missing"] == [what for what, _, _ in mistakes(tmp_path, damaged)]


@pytest.mark.parametrize(("name", "what"), [("config.json", "not valid JSON"), ("model.safetensors", "cannot be read")])
def test_a_cut_file_is_told(tmp_path, damaged, name, what):
    file = damaged["draft"].path / name
    file.write_bytes(file.read_bytes()[:200])
    assert any(told.startswith(f"{name}: {what}") for told, _, _ in mistakes(tmp_path, damaged))


def test_all_mistakes_are_told_at_once(tmp_path, damaged):
    def config(data):
        del data["block_size"]
        data["vocab_size"] = 7
        data["dflash_config"]["projector_type"] = "domino"

    def tensors(weights):
        del weights["layers.1.self_attn.k_norm.weight"]
        weights["embed_tokens.weight"] = torch.zeros(600, 128)
        weights["norm.weight"][0] = float("inf")

    edit_config(damaged, config)
    edit_tensors(damaged, tensors)
    (damaged["draft"].path / "mask_embedding.pt").write_bytes(b"")
    assert [
        "mask_embedding.pt: does not belong here",
        "config.json: block_size is missing",
        "config.json: vocab_size must be 600, got 7",
        "config.json: dflash_config.projector_type is not a field of the contract",
        "model.safetensors: embed_tokens.weight does not belong here",
        "model.safetensors: layers.1.self_attn.k_norm.weight is missing",
        "model.safetensors: norm.weight has 1 non-finite values of 128",
    ] == [what for what, _, _ in mistakes(tmp_path, damaged)]
