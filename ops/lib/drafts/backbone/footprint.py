"""Trained parameters of a draft, computed from its sizes; torch-free.

Legend: M hidden, W intermediate, H query heads, G key/value heads, D head size
"""

from __future__ import annotations

from ops.lib.drafts.backbone.config import DraftConfig

MASTER = 4  # bytes of a float32 weight, gradient, moment or average


def draft_parameters(config: DraftConfig) -> int:
    """Trained weights: without embedding and head, which are the target's."""
    M, W, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, G = config.num_attention_heads, config.num_key_value_heads
    attention = 2 * M * H * D + 2 * M * G * D + 2 * D
    biases = H * D + 2 * G * D + M if config.attention_bias else 0
    layer = attention + biases + 3 * M * W + 2 * M
    backbone = len(config.target_layer_ids) * M * M + 2 * M + config.num_hidden_layers * layer
    return backbone + config.algorithm.parameters(config)
