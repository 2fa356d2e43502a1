"""Every wrong field of an export's config fails at the gate, with what SGLang would do and the remedy."""

from __future__ import annotations

import re

import pytest
from damaged_cases import REWRITE, edit_config, mistakes

from ops.lib.data.files import read_json, write_json


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
            "logs a warning and continues",
            REWRITE,
        ),
        (
            lambda config: config["dflash_config"].pop("target_layer_ids"),
            "dflash_config.target_layer_ids is missing",
            "computes ids by the formula for the number of draft layers",
            REWRITE,
        ),
        (lambda config: config.pop("block_size"), "block_size is missing", "serves blocks of 16", REWRITE),
        (
            lambda config: config["dflash_config"].update(block_size=8),
            "dflash_config.block_size is also at the top level, as block_size",
            "uses the nested one",
            "remove dflash_config.block_size",
        ),
        (
            lambda config: config["dflash_config"].pop("mask_token_id"),
            "dflash_config.mask_token_id is missing",
            'uses the id of the tokenizer\'s "<|MASK|>"',
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
            "starts, and crashes at the first prefill",
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
            "captures each layer once, in their order",
            "train the draft again",
        ),
        (
            lambda config: config["dflash_config"].update(target_layer_ids=[0, 1, 2, 3, 4]),
            "dflash_config.target_layer_ids is [0, 1, 2, 3, 4], but the draft was trained with [1, 2, 3, 4, 5]",
            "silently captures other layers than in training",
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
            "silently rotates by other angles than in training",
            "train the draft again",
        ),
        (
            lambda config: config.update(
                layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True
            ),
            'layer_types is ["sliding_attention", "sliding_attention"], but the draft was trained with',
            "silently masks by it",
            "train the draft again",
        ),
        (
            lambda config: config.update(
                layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True
            ),
            "is_causal is missing",
            "takes the default of its version",
            REWRITE,
        ),
        (
            lambda config: config.update(
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=8,
                use_sliding_window=True,
                is_causal=True,
            ),
            "is_causal: true does not fit these layer_types",
            "makes every layer causal, or none of them",
            "train the draft again",
        ),
        (
            lambda config: config.update(is_causal=False),
            "is_causal is not a field of the contract",
            "many silently change what a draft computes",
            "remove is_causal",
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
            "silently serves the draft with any target",
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
            "refuses to start if the target's context is longer (ValueError",
            "train the draft again",
        ),
        (
            lambda config: config.update(hidden_act="gelu"),
            'hidden_act must be "silu", got "gelu"',
            "refuses to start (ValueError: unsupported activation), or computes another one",
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
            "dflash_config.attention_value_scale is not a field of the contract",
            "many silently change what a draft computes",
            "remove dflash_config.attention_value_scale",
        ),
        (
            lambda config: config.update(rope_parameters={"rope_type": "default", "rope_theta": 7.0}),
            "rope_parameters is not a field of the contract",
            "many silently change what a draft computes",
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
    assert "with which the draft was not trained" in sglang and REWRITE in remedy


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


@pytest.mark.parametrize("kind", ["an EOS id", "the pad id"])
def test_a_mask_token_that_texts_hold_is_told(tmp_path, damaged, kind):
    info = read_json(damaged["tokens"].path / "tokens.json")
    token = info["eos_token_ids"][0] if kind == "an EOS id" else info["pad_token_id"]
    edit_config(damaged, lambda config: config["dflash_config"].update(mask_token_id=token))
    [(what, sglang, remedy)] = mistakes(tmp_path, damaged)
    assert f"config.json: dflash_config.mask_token_id is {kind} of the target" == what
    assert "silently embeds the EOS token in every slot" in sglang and "set mask_token_id of train_dflash" in remedy
