"""The model types of the families of targets, and what a config.json of each must have. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError
from ops.lib.data.files import shown_json

QWEN3 = ("qwen3", "qwen3_moe")
QWEN25_VL = ("qwen2_5_vl",)
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
QWEN35 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
SUPPORTED = (*QWEN3, *QWEN25_VL, *QWEN3_VL, *QWEN35)
# Beginnings of names of tensors that do not belong to the language model: its images, and several tokens at once.
VISUAL, MTP = "visual.", "mtp."
MASK_TOKENS = ("<|mask|>", "<|MASK|>")  # of tokenizers that have one
# Ids that no text of a family gives: 151669 lies beyond the tokenizers of Qwen3 and Qwen2.5-VL.
QWEN3_MASK_ID, QWEN35_MASK_ID = 151669, 248070


def check_model_type(config: Mapping[str, Any]) -> None:
    """Check that a config.json is of a supported family. Raises DataError with the supported model types."""
    if config.get("model_type") not in SUPPORTED:
        kind = shown_json(config.get("model_type"))
        raise DataError(f"model_type {kind} is not supported; supported: {', '.join(SUPPORTED)}")


def family_mask_id(model_type: str) -> int:
    """The id of the mask token of a supported family."""
    return QWEN35_MASK_ID if model_type in QWEN35 else QWEN3_MASK_ID


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: text_config if there is one, else the whole."""
    return config.get("text_config") or config


def patch_dim(vision: Mapping[str, Any]) -> int:
    """The length of a row of pixel values, from vision_config."""
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    return int(channels * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json ties the head to the embedding: at the top level, or else in text_config.

    The supported families' classes default to false.
    """
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings", False) if isinstance(text, Mapping) else False
    return bool(config.get("tie_word_embeddings", inner))


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
DEEPSTACK, DEPTH = (8, 16, 24), 27  # of the class in transformers


def check_family_config(config: Mapping[str, Any]) -> None:
    """Check a config for missing sizes and parts, and for values without effect or with another one. Raises
    DataError.
    """
    text = text_part(config)
    missing = [name for name in SIZES if name not in text]
    if missing:
        raise DataError(f"config.json: missing {', '.join(missing)}, also in text_config")
    kind, seeing = config.get("model_type"), config.get("vision_config")
    if seeing is None:
        if kind in (*QWEN25_VL, *QWEN3_VL):
            raise DataError(f"config.json: a {kind} without vision_config")
        return
    if kind not in (*QWEN25_VL, *QWEN3_VL, *QWEN35):
        return
    missing = [f"vision_config.{name}" for name in ("patch_size",) if name not in seeing]
    missing += [name for name in ("image_token_id",) if name not in config]
    if missing:
        raise DataError(f"config.json: missing {', '.join(missing)}")
    if kind in QWEN3_VL:
        _check_deepstack(seeing)
        _check_experts(text)


def check_served_config(config: Mapping[str, Any]) -> None:
    """Check that SGLang loads a config as transformers does, given the fields that `for_serving` adds. Raises
    DataError.
    """
    kind, text, seeing = config.get("model_type"), text_part(config), config.get("vision_config")
    if kind == "qwen3_moe" and is_tied(config):
        raise DataError(
            "config.json: tie_word_embeddings is set, but SGLang's Qwen3-MoE does not support a tied head: it would "
            "silently use a random one; save the checkpoint untied, with lm_head.weight"
        )
    if kind in QWEN3_VL and seeing is not None and "moe_intermediate_size" in text:
        indexes = seeing.get("deepstack_visual_indexes", DEEPSTACK)
        if len(indexes) != 3:
            raise DataError(
                f"config.json: vision_config.deepstack_visual_indexes {list(indexes)}: SGLang supports only three in a "
                "Qwen3-VL with experts"
            )
    if kind not in QWEN35:
        return
    if seeing is None and not str(kind).endswith("_text"):
        raise DataError(
            f"config.json: a {kind} without vision_config, which SGLang would load with a vision tower of random "
            "weights; a text-only model has a model_type that ends in _text"
        )
    if full_attention_interval(text) is None:
        raise DataError(
            f"config.json: layer_types does not repeat at an interval, which SGLang requires: {text['layer_types']}"
        )


def full_attention_interval(text: Mapping[str, Any]) -> int | None:
    """The interval between layers with full attention, the last of each group; None if it varies."""
    kinds = text.get("layer_types")
    if kinds is None:
        return int(text.get("full_attention_interval", 4))
    interval = [*kinds, "full_attention"].index("full_attention") + 1
    regular = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(len(kinds))]
    return interval if regular == list(kinds) else None


def _check_deepstack(seeing: Mapping[str, Any]) -> None:
    """Check the deepstack indices: one at or past the vision tower's depth would have no effect. Raises DataError."""
    depth = seeing.get("depth", DEPTH)
    beyond = [index for index in seeing.get("deepstack_visual_indexes", DEEPSTACK) if index >= depth]
    if beyond:
        raise DataError(
            f"config.json: vision_config.deepstack_visual_indexes names the layers {beyond}, but the vision tower "
            f"has only {depth}"
        )


def _check_experts(text: Mapping[str, Any]) -> None:
    if "moe_intermediate_size" not in text:
        return
    expert, hidden = text["moe_intermediate_size"], text["hidden_size"]
    if hidden in (expert, 2 * expert):
        raise DataError(
            f"config.json: text_config.moe_intermediate_size {expert} makes square matrices with a hidden_size of "
            f"{hidden}, and transformers cannot tell their orientation"
        )
