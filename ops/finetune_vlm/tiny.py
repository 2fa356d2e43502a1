"""The built-in target: a Qwen3-VL small enough to be trained from random weights on two CPU cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from ops.lib.target.tiny_config import tiny_config


def tiny_qwen3_vl(
    tokens: Mapping[str, Any], special_ids: Mapping[str, int], seed: int
) -> Qwen3VLForConditionalGeneration:
    """Random weights from the seed; `tokens` is tokens.json and decides vocabulary, patches and special ids."""
    config = Qwen3VLConfig(**tiny_config(tokens, special_ids))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config)
