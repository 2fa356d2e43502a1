"""What a draft's config decides about its size: its tensors, its parameters, and the operations of a training step.

Operations are counted for model FLOP utilisation and for dealing samples by cost. A product of [a, b] with [b, c]
counts 2 a b c. A product with trained weights and a differentiated input costs three of them (forward, and the
gradients of input and weight); attention's two products cost three times two as well. Features need no gradient, so fc
costs two; the head is frozen, so it costs two. Elementwise work is not counted, nor is what is done twice to save
memory (flash attention, checkpointing), nor saved what a step can leave out (equal mask slots in layer 0, slot 0 in the
last layer).

Legend: T context tokens, F features (layers * hidden), M hidden, N blocks, K slots of a block, H query heads, G
key/value heads, D head size, I intermediate size, V vocabulary, W weighted slots, C context tokens seen, summed over
the blocks: in a sliding layer at most N times the window.

    fc           2 * 2 T F M
    a layer      3 * 2 T M * 2 G D              context keys and values
               + 3 * 2 N K M * (2 H D + 2 G D)  q and o, k and v of the blocks
               + 3 * 2 N K * 3 M I              MLP
               + 3 * 2 * 2 K H D (C + N K)      scores and their product with the values
    head         2 * 2 W M V
    teacher          2 W M V                     the target's logits, where the loss reads them
    algorithm    N K times its own `slot_flops`
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ops.lib.drafts.backbone.config import (
    SLIDING_ATTENTION,
    DraftConfig,
    contract_part,
    full_name,
    lookup,
    to_serving,
)

MASTER = 4  # bytes of a float32 weight, gradient, moment or average


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the serving contract for a config.json, with their shapes."""
    hidden, head_dim, mlp = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layers = len(lookup(config, full_name("target_layer_ids", config))[1])
    shapes = {"fc.weight": (hidden, layers * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    projections = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    projections["o_proj"] = (hidden, q_size)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{norm}.weight"] = (head_dim,)
        for name, shape in projections.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = (mlp, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, mlp)
    own: Mapping[str, tuple[int, ...]] = contract_part(config, "shapes")(config)
    return {**shapes, **own}


def draft_parameters(config: DraftConfig) -> int:
    """The number of trained weights; embedding and head are the target's."""
    return sum(map(prod, expected_shapes(to_serving(config)).values()))


def step_flops(
    config: DraftConfig,
    context_tokens: int,
    blocks: int,
    prefix_tokens_sum: int,
    weighted_slots: int,
    *,
    with_teacher: bool = False,
) -> float:
    """The FLOPs of a step's forward and backward pass.

    prefix_tokens_sum: the sum over blocks of the context that each one sees.
    """
    K, M, D = config.layout().queries, config.hidden_size, config.head_dim
    H, G = config.num_attention_heads, config.num_key_value_heads
    slots = blocks * K
    fc = 2 * 2 * context_tokens * len(config.target_layer_ids) * M * M
    context = 3 * 2 * context_tokens * M * 2 * G * D
    projections = 3 * 2 * slots * M * (2 * H * D + 2 * G * D)
    mlp = 3 * 2 * slots * 3 * M * config.intermediate_size
    head = (2 * 2 + 2 * with_teacher) * weighted_slots * M * config.vocab_size
    attention = 0
    for kind in config.layer_types:
        seen = prefix_tokens_sum
        if kind == SLIDING_ATTENTION:
            assert config.sliding_window is not None  # DraftConfig is checked
            seen = min(seen, blocks * config.sliding_window)
        attention += 3 * 2 * 2 * K * H * D * (seen + slots)
    own = slots * config.algorithm.slot_flops(config)
    return float(fc + config.num_hidden_layers * (context + projections + mlp) + attention + head + own)
