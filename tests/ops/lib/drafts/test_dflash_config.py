"""Sliding-window layers in the draft's config and in the config.json that engines read."""

from typing import Any

import pytest
from draft_chain import tiny_config
from transformers import Qwen3Config

from dsl.errors import ConfigError
from ops.lib.drafts.backbone.config import from_serving, to_serving

MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 64}


def test_only_sliding_layers_have_a_window():
    config = tiny_config(**MIXED)
    assert [64, None] == [config.window(layer) for layer in range(2)]
    assert from_serving(to_serving(config)) == config


@pytest.mark.parametrize("window", [None, 0, 1])
def test_sliding_layers_need_a_window(window):
    with pytest.raises(ConfigError, match="sliding_window: layers of sliding_attention need one of at least 2 tokens"):
        tiny_config(**MIXED | {"sliding_window": window})


def test_a_window_without_a_sliding_layer_has_no_meaning():
    config = tiny_config(sliding_window=64)
    assert [None, None] == [config.window(layer) for layer in range(2)]
    assert to_serving(config)["use_sliding_window"] is False


def test_transformers_reads_the_window_from_the_serving_config():
    read = Qwen3Config(**to_serving(tiny_config(**MIXED)))
    assert (64, ["sliding_attention", "full_attention"]) == (read.sliding_window, read.layer_types)


@pytest.mark.parametrize(("config", "said"), [({}, True), (MIXED, False), (MIXED, None)])
def test_a_serving_config_that_contradicts_its_layers_is_refused(config, said):
    data = to_serving(tiny_config(**config)) | {"use_sliding_window": said}
    with pytest.raises(ConfigError, match="use_sliding_window: must be"):
        from_serving(data)


ALL = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64}


@pytest.mark.parametrize(("config", "causality"), [({}, "absent"), (MIXED, None), (ALL, True)])
def test_a_window_always_comes_with_is_causal(config, causality):
    assert causality == to_serving(tiny_config(**config)).get("is_causal", "absent")


@pytest.mark.parametrize(("config", "said"), [({}, True), (MIXED, True), (MIXED, False), (ALL, False), (ALL, "yes")])
def test_a_causality_that_contradicts_the_layers_is_refused(config, said):
    data = to_serving(tiny_config(**config)) | {"is_causal": said}
    with pytest.raises(ConfigError, match=r"is_causal: .+ does not fit these layer_types"):
        from_serving(data)


@pytest.mark.parametrize("config", [{}, MIXED, ALL])
def test_an_export_from_before_is_causal_is_read(config):
    data = {name: value for name, value in to_serving(tiny_config(**config)).items() if name != "is_causal"}
    assert tiny_config(**config) == from_serving(data)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"dflash_config": {"mask_token_id": None}}, "dflash_config.mask_token_id: must be a number, got null"),
        (
            {"dflash_config": {"target_layer_ids": ["1"]}},
            'dflash_config.target_layer_ids: must be a list of numbers, got ["1"]',
        ),
        ({"hidden_size": "8"}, 'hidden_size: must be a number, got "8"'),
        ({"rope_theta": None}, "rope_theta: must be a number, got null"),
        ({"layer_types": None}, "layer_types: must be a list of strings, got null"),
        ({"rope_scaling": "yarn"}, 'rope_scaling: must be a table, got "yarn"'),
        ({"block_size": True}, "block_size: must be a number, got true"),
        ({"dflow": {"positions": 1}}, "dflow.positions: must be a string, got 1"),
    ],
)
def test_a_serving_config_with_a_value_of_another_type_names_field_and_value(wrong, told):
    data: dict[str, Any] = to_serving(tiny_config())
    for name, value in wrong.items():
        data[name] = data[name] | value if isinstance(value, dict) else value
    with pytest.raises(ConfigError) as caught:
        from_serving(data)
    assert f"draft config:\n  {told}" == str(caught.value)


def test_whole_numbers_do_for_floats_and_null_for_what_there_may_be_none_of():
    data = to_serving(tiny_config()) | {"rope_theta": 10000, "rope_scaling": None, "sliding_window": None}
    assert tiny_config(rope_theta=10000.0) == from_serving(data)
