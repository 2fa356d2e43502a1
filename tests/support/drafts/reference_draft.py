"""The draft's forward pass token by token, written from the serving contract alone: slow, obvious, differentiable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def reference_block(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], features_SF: Tensor, embeds_KM: Tensor, anchor: int
) -> Tensor:
    """The hidden states [K, M] of the block at `anchor`, from a config.json and the tensors of model.safetensors."""
    eps = config["rms_norm_eps"]
    context = [_norm(weights["fc.weight"] @ feature, weights["hidden_norm.weight"], eps) for feature in features_SF]
    context = context[:anchor]
    slots = list(embeds_KM)
    for layer in range(config["num_hidden_layers"]):
        own = {name.removeprefix(f"layers.{layer}."): weight for name, weight in weights.items()}
        normed = [_norm(slot, own["input_layernorm.weight"], eps) for slot in slots]
        tokens = [(position, token) for position, token in enumerate(context)]
        tokens += [(anchor + k, token) for k, token in enumerate(normed)]
        seen = [_seen(config, layer, anchor + k, tokens) for k in range(len(normed))]
        mixed = [_attend(config, own, token, anchor + k, seen[k]) for k, token in enumerate(normed)]
        slots = [slot + mix for slot, mix in zip(slots, mixed, strict=True)]
        slots = [slot + _mlp(own, _norm(slot, own["post_attention_layernorm.weight"], eps)) for slot in slots]
    return torch.stack([_norm(slot, weights["norm.weight"], eps) for slot in slots])


def _seen(
    config: Mapping[str, Any], layer: int, position: int, tokens: list[tuple[int, Tensor]]
) -> list[tuple[int, Tensor]]:
    """The tokens, with their positions, that the slot at `position` sees in this layer."""
    if config["layer_types"][layer] == "full_attention":
        return tokens
    return [(place, token) for place, token in tokens if 0 <= position - place < config["sliding_window"]]


def _attend(
    config: Mapping[str, Any], own: Mapping[str, Tensor], token: Tensor, position: int, tokens: list[tuple[int, Tensor]]
) -> Tensor:
    size, eps = config["head_dim"], config["rms_norm_eps"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]

    def head(name: str, number: int, x: Tensor) -> Tensor:
        return _linear(own, name, x)[number * size : (number + 1) * size]

    heads = []
    for number in range(config["num_attention_heads"]):
        query = _turn(config, _norm(head("q_proj", number, token), own["self_attn.q_norm.weight"], eps), position)
        scores, values = [], []
        for place, other in tokens:
            key = _norm(head("k_proj", number // group, other), own["self_attn.k_norm.weight"], eps)
            scores.append(query @ _turn(config, key, place) / math.sqrt(size))
            values.append(head("v_proj", number // group, other))
        heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
    return _linear(own, "o_proj", torch.cat(heads))


def _linear(own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    projected = own[f"self_attn.{name}.weight"] @ x
    bias = own.get(f"self_attn.{name}.bias")
    return projected if bias is None else projected + bias


def _turn(config: Mapping[str, Any], x: Tensor, position: int) -> Tensor:
    """Apply RoPE to a head: the pair (x[i], x[i + Z/2]) is rotated by position * theta^(-2i/Z)."""
    turned = list(x)
    size = int(config["head_dim"] * config["partial_rotary_factor"])
    for i in range(size // 2):
        angle = position * config["rope_theta"] ** (-2 * i / size)
        a, b = x[i], x[i + size // 2]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + size // 2] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(turned)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _mlp(own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate, up = own["mlp.gate_proj.weight"] @ x, own["mlp.up_proj.weight"] @ x
    return own["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
