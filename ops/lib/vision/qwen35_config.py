"""A Qwen3.5's config as SGLang reads it: other fields than those that transformers goes by, and writes.

SGLang takes the kinds of layers from an interval, and the rotary share from the field outside of the rope's; without
deepstack_visual_indexes it takes those of Qwen3-VL. transformers writes layer_types without the interval where it made
the list itself, always a share of 0.25, and the indexes only where they were there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError

Config = Mapping[str, Any]


def complete(config: Config) -> dict[str, Any]:
    """The config with the fields that SGLang reads, as transformers means them."""
    nested = bool(config.get("text_config"))
    text = dict(config["text_config"] if nested else config)
    interval = full_attention_interval(text)
    if interval is not None:
        text["full_attention_interval"] = interval
    share = (text.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share is not None:
        text["partial_rotary_factor"] = share
    whole = {**config, "text_config": text} if nested else text
    if config.get("vision_config") is not None:
        whole["vision_config"] = {"deepstack_visual_indexes": [], **config["vision_config"]}
    return whole


def check(config: Config) -> None:
    """Raises DataError for a config of which SGLang makes another model than transformers does."""
    if config.get("vision_config") is None and not config["model_type"].endswith("_text"):
        raise DataError(
            f"config.json: a {config['model_type']} without vision_config, of which SGLang would make one with a "
            "vision tower of random weights; the text model alone has a model_type that ends in _text"
        )
    text = config.get("text_config") or config
    if full_attention_interval(text) is None:
        raise DataError(
            "config.json: layer_types does not repeat at an interval, and SGLang knows nothing else: "
            f"{text['layer_types']}"
        )
    meant, said = _flat(complete(config)), _flat(config)
    wrong = [name for name, value in meant.items() if name not in said or said[name] != value]
    if wrong:
        raise DataError(
            f"config.json: SGLang would misread it, because of {', '.join(wrong)}: missing, or not what transformers "
            "goes by; load_target and finetune_vlm write a config with them"
        )


def full_attention_interval(text: Config) -> int | None:
    """Every how many layers one has full attention, the last of each group; None where that varies."""
    kinds = text.get("layer_types")
    if kinds is None:
        return int(text.get("full_attention_interval", 4))
    interval = [*kinds, "full_attention"].index("full_attention") + 1
    regular = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(len(kinds))]
    return interval if regular == list(kinds) else None


def _flat(config: Config) -> dict[str, Any]:
    """Fields by dotted name, those of text_config and vision_config among them."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("text_config", "vision_config") and value is not None:
            fields |= {f"{name}.{inner}": of_it for inner, of_it in value.items()}
        else:
            fields[name] = value
    return fields
