"""The model types of the families of targets, as `model_type` of a config.json names them. Loads no torch."""

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
    """Raises DataError, with the supported model types, for the config.json of another family."""
    if config.get("model_type") not in SUPPORTED:
        kind = shown_json(config.get("model_type"))
        raise DataError(f"model_type {kind} is not supported; supported: {', '.join(SUPPORTED)}")


def family_mask_id(model_type: str) -> int:
    """The mask token of a supported family."""
    return QWEN35_MASK_ID if model_type in QWEN35 else QWEN3_MASK_ID


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json makes the embedding the head: at the top level, or else in text_config. The classes of the
    supported families have false where neither says it.
    """
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings", False) if isinstance(text, Mapping) else False
    return bool(config.get("tie_word_embeddings", inner))
