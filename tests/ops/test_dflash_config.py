"""Sliding-window layers in the draft's config and in the config.json that engines read."""

import pytest
from draft_chain import tiny_config
from transformers import Qwen3Config

from dsl.errors import ConfigError
from ops.dflash.config import from_serving, to_serving

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
