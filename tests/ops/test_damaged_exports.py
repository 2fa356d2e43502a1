"""Every damaged export fails at the gate with the field, what SGLang would do and the remedy."""

from __future__ import annotations

import re
import shutil

import attrs
import pytest
import torch
from gate_cases import check
from safetensors.torch import load_file, save_file

from dsl.errors import DataError
from ops.files import read_json, write_json

RANDOM = "leaves what happens to stand in its memory, and accepts about 1 token a step"
REWRITE = "write the export again"


@pytest.fixture
def damaged(gate_inputs, tmp_path):
    """The same inputs with a copy of the draft that a test may damage."""
    folder = shutil.copytree(gate_inputs["draft"].path, tmp_path / "damaged")
    return gate_inputs | {"draft": attrs.evolve(gate_inputs["draft"], path=folder)}


def edit_config(inputs, change):
    path = inputs["draft"].path / "config.json"
    config = read_json(path)
    change(config)
    write_json(path, config)


def edit_tensors(inputs, change):
    path = inputs["draft"].path / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def mistakes(folder, inputs):
    """What the gate says, as (what, what SGLang does, remedy)."""
    with pytest.raises(DataError) as caught:
        check(folder, inputs)
    lines = str(caught.value).splitlines()[1:]
    found = [tuple(line.strip() for line in lines[start : start + 3]) for start in range(0, len(lines), 3)]
    assert {"SGLang", "remedy"} == {line.partition(":")[0] for mistake in found for line in mistake[1:]}
    return found


def rename(table, old, new):
    table[new] = table.pop(old)


@pytest.mark.parametrize(
    ("change", "what", "sglang", "remedy"),
    [
        (
            lambda config: config.update(vocab_size=601),
            "vocab_size must be 600, got 601",
            "does not check it",
            REWRITE,
        ),
        (
            lambda config: config.update(num_target_layers=9),
            "num_target_layers must be 8, got 9",
            "warns in its log and goes on",
            REWRITE,
        ),
        (
            lambda config: config["dflash_config"].pop("target_layer_ids"),
            "dflash_config.target_layer_ids is missing",
            "computes ids by the formula for as many layers as the draft has",
            REWRITE,
        ),
        (lambda config: config.pop("block_size"), "block_size is missing", "serves blocks of 16", REWRITE),
        (
            lambda config: config["dflash_config"].update(block_size=8),
            "dflash_config.block_size stands beside block_size at the top level",
            "takes the nested one",
            "remove dflash_config.block_size",
        ),
        (
            lambda config: config["dflash_config"].pop("mask_token_id"),
            "dflash_config.mask_token_id is missing",
            'takes the id of the tokenizer\'s "<|MASK|>"',
            REWRITE,
        ),
        (
            lambda config: config["dflash_config"].update(mask_token_id=600),
            "dflash_config.mask_token_id: 600 is no id below vocab_size = 600",
            "refuses an id outside the target's vocabulary (ValueError)",
            "train the draft again",
        ),
        (
            lambda config: config.update(architectures=["DFlushDraftModel"]),
            'architectures must be ["DFlashDraftModel"], got ["DFlushDraftModel"]',
            "refuses to start (ValueError)",
            REWRITE,
        ),
        (
            lambda config: config["dflash_config"].update(target_layer_ids=[1, 2, 3, 4, 7]),
            "target_layer_ids: [7] outside 0..6",
            "starts, and dies at the first prefill",
            "train the draft again",
        ),
        (
            lambda config: config["dflash_config"].update(target_layer_ids=[1, 2, 3, 4, 8]),
            "target_layer_ids: [8] outside 0..6",
            "refuses to start (ValueError: an id out of range)",
            "train the draft again",
        ),
        (
            lambda config: config["dflash_config"].update(target_layer_ids=[5, 4, 3, 2, 1]),
            "target_layer_ids: must be distinct and ascending, got [5, 4, 3, 2, 1]",
            "captures in the order of the layers, each once",
            "train the draft again",
        ),
        (
            lambda config: config["dflash_config"].update(target_layer_ids=[0, 1, 2, 3, 4]),
            "dflash_config.target_layer_ids is [0, 1, 2, 3, 4], but the draft was trained with [1, 2, 3, 4, 5]",
            "captures other layers than in training and says nothing",
            "train the draft again",
        ),
        (
            lambda config: config.update(block_size=8),
            "block_size is 8, but the draft was trained with 4",
            "proposes blocks of this size",
            "train the draft again",
        ),
        (
            lambda config: config.update(rope_theta=123.0),
            "rope_theta is 123.0, but the draft was trained with",
            "turns by other angles than in training and says nothing",
            "train the draft again",
        ),
        (
            lambda config: config.update(
                layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True
            ),
            'layer_types is ["sliding_attention", "sliding_attention"], but the draft was trained with',
            "masks by it and says nothing",
            "train the draft again",
        ),
        (
            lambda config: config["dflow"].update(positions="mrope"),
            'positions: must be "sequential", got "mrope"',
            "its positions are always 1-D",
            "train the draft again",
        ),
        (
            lambda config: config["dflow"].update(target="f" * 64),
            "dflow.target is ffffffffffff, which the draft was trained for, but this target is",
            "serves the draft with any target and says nothing",
            "the target of the training",
        ),
        (lambda config: config["dflow"].pop("trained"), "dflow.trained is missing", "does not read it", REWRITE),
        (lambda config: config["dflow"].pop("digest"), "dflow.digest is missing", "does not read it", REWRITE),
        (
            lambda config: config["dflow"]["digest"].pop("tensors"),
            "dflow.digest.tensors is missing",
            "does not read it",
            REWRITE,
        ),
        (
            lambda config: config["dflash_config"].update(target_layer_ids=[]),
            "dflash_config.target_layer_ids: names no layer",
            "refuses to start (ValueError: target_layer_ids must be non-empty)",
            "train the draft again",
        ),
        (
            lambda config: config.update(tie_word_embeddings=True),
            "tie_word_embeddings",
            "does not read it",
            REWRITE,
        ),
        (
            lambda config: config.update(max_position_embeddings=64),
            "max_position_embeddings is 64, but the draft was trained with",
            "refuses to start where the target's context is longer (ValueError",
            "train the draft again",
        ),
        (
            lambda config: config.update(hidden_act="gelu"),
            'hidden_act must be "silu", got "gelu"',
            "refuses to start (ValueError: silu alone is supported)",
            REWRITE,
        ),
        (
            lambda config: config.update(block_size="4"),
            'block_size must be a number, got "4"',
            "proposes blocks of this size",
            REWRITE,
        ),
        (
            lambda config: config["dflash_config"].update(attention_value_scale=0.5),
            "dflash_config.attention_value_scale is no field of the contract",
            "much of it changes what a draft computes, without a word",
            "remove dflash_config.attention_value_scale",
        ),
        (
            lambda config: config.update(rope_parameters={"rope_type": "default", "rope_theta": 7.0}),
            "rope_parameters is no field of the contract",
            "much of it changes what a draft computes, without a word",
            "remove rope_parameters",
        ),
    ],
)
def test_a_wrong_field_is_told_with_what_sglang_does_and_the_remedy(tmp_path, damaged, change, what, sglang, remedy):
    edit_config(damaged, change)
    found = mistakes(tmp_path, damaged)
    assert [True] == [what in told and sglang in does and remedy in todo for told, does, todo in found if what in told]
    assert all(told.startswith("config.json") or "fc.weight" in told for told, _, _ in found)


@pytest.mark.parametrize(("field", "value"), [("block_size", 8), ("rope_theta", 123.0)])
def test_a_field_changed_together_with_the_record_of_the_training_is_told(tmp_path, damaged, field, value):
    def both(config):
        config[field] = value
        config["dflow"]["trained"][field] = value

    edit_config(damaged, both)
    [(what, sglang, remedy)] = mistakes(tmp_path, damaged)
    assert re.fullmatch(
        r"config\.json: dflow\.trained is not that of the export: \w{12}, but dflow\.digest\.trained is \w{12}", what
    )
    assert "with which the draft was not trained, without a word" in sglang and REWRITE in remedy


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
    assert "loads what fits by name and shape without a word" in sglang and REWRITE in remedy


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
    assert f"{name}: is no plain file but {'a directory' if change is as_directory else 'a link'}" == what
    assert "follows a link that leads elsewhere" in sglang and REWRITE in remedy


def test_a_card_that_is_no_text_is_told(tmp_path, damaged):
    (damaged["draft"].path / "README.md").write_bytes(b"\xff\xfe\x00")
    [(what, _, _)] = mistakes(tmp_path, damaged)
    assert what.startswith("README.md: cannot be read as text in UTF-8 (")


def test_every_field_of_the_contract_is_missed_by_its_name(tmp_path, damaged):
    whole = read_json(damaged["draft"].path / "config.json")
    fields = [name for name in whole if name not in ("dflash_config", "dflow")]
    fields += [f"{nest}.{name}" for nest in ("dflash_config", "dflow") for name in whole[nest]]
    for name in fields:
        config = read_json(damaged["draft"].path / "config.json")
        nest, _, inner = name.rpartition(".")
        del (config[nest] if nest else config)[inner]
        write_json(damaged["draft"].path / "config.json", config)
        assert f"config.json: {name} is missing" in [what for what, _, _ in mistakes(tmp_path, damaged)]
        write_json(damaged["draft"].path / "config.json", whole)
    assert 30 == len(fields)


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
            "stops while it loads the weights",
            REWRITE,
        ),
        (
            lambda weights: weights.update({"lm_head.weight": torch.zeros(600, 128)}),
            "lm_head.weight does not belong here",
            "ignores a tensor that it does not know, without a word",
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
            "casts it to the server's dtype without a word",
            REWRITE,
        ),
        (
            lambda weights: weights["fc.weight"].view(-1)[3:5].fill_(float("nan")),
            "fc.weight holds 2 values of 81920 that are not finite",
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
    assert (f"{name}: does not belong here", "remedy: remove the file") == (what, remedy)
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


@pytest.mark.parametrize("kind", ["an EOS id", "the pad id"])
def test_a_mask_token_that_texts_hold_is_told(tmp_path, damaged, kind):
    info = read_json(damaged["tokens"].path / "tokens.json")
    token = info["eos_token_ids"][0] if kind == "an EOS id" else info["pad_token_id"]
    edit_config(damaged, lambda config: config["dflash_config"].update(mask_token_id=token))
    [(what, sglang, remedy)] = mistakes(tmp_path, damaged)
    assert f"config.json: dflash_config.mask_token_id is {kind} of the target" == what
    assert "in every slot without a word" in sglang and "give load_target a mask_token_id" in remedy


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
        "config.json: dflash_config.projector_type is no field of the contract",
        "model.safetensors: embed_tokens.weight does not belong here",
        "model.safetensors: layers.1.self_attn.k_norm.weight is missing",
        "model.safetensors: norm.weight holds 1 values of 128 that are not finite",
    ] == [what for what, _, _ in mistakes(tmp_path, damaged)]
