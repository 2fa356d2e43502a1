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


def check_model_type(config: Mapping[str, Any]) -> None:
    """Raises DataError, with the supported model types, for the config.json of another family."""
    if config.get("model_type") not in SUPPORTED:
        kind = shown_json(config.get("model_type"))
        raise DataError(f"model_type {kind} is not supported; supported: {', '.join(SUPPORTED)}")
