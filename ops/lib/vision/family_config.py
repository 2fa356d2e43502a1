"""What a target's config.json must have, by its family. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError
from ops.lib.vision.model_types import QWEN3_VL, QWEN25_VL, QWEN35

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
DEEPSTACK, DEPTH = (8, 16, 24), 27  # of the class in transformers


def check_family_config(config: Mapping[str, Any]) -> None:
    """Raises DataError for sizes and parts that are missing, and for values that would have no effect or another."""
    text = config.get("text_config") or config
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


def _check_deepstack(seeing: Mapping[str, Any]) -> None:
    """An index at or past the depth of the vision tower would silently have no effect."""
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
