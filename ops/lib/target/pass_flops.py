"""The operations of a target's forward pass over a text, from its config.json.

A product of [a, b] with [b, c] counts 2 a b c. Every weight of the decoder layers is used once for a token, but for the
experts that are not chosen; attention's two products see half of the text on average. The head is not run, and the
vision tower is not counted, whose work depends on the images.
"""

from __future__ import annotations

from ops.lib.target.sizes import EXPERTS, LINEAR, UNGATED, Config, TargetSizes, head_dim, layer_types

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")  # experts that a token takes


def token_flops(sizes: TargetSizes, tokens: float) -> float:
    """The FLOPs of one token, mean over a text of so many tokens."""
    text = sizes.text
    attending = sum(kind != LINEAR for kind in layer_types(text))
    width = int(text["num_attention_heads"]) * head_dim(text)
    return 2.0 * (sizes.layers - idle_parameters(text)) + attending * 2 * 2 * width * tokens / 2


def idle_parameters(text: Config) -> int:
    """The parameters of experts that a token does not use, in all layers; 0 for a dense target, or where the config
    does not say how many are chosen.
    """
    experts = next((int(text[name]) for name in EXPERTS if text.get(name)), 0)
    chosen = next((int(text[name]) for name in CHOSEN if text.get(name)), experts)
    if experts <= chosen:
        return 0
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    dense, every = text.get("mlp_only_layers") or [], text.get("decoder_sparse_step") or 1
    first = text.get("first_k_dense_replace") or 0
    sparse = sum(
        layer >= first and layer not in dense and (layer + 1) % every == 0 for layer in range(text["num_hidden_layers"])
    )
    matrices = 2 if text.get("model_type") in UNGATED else 3
    return int(sparse * (experts - chosen) * matrices * text["hidden_size"] * width)
