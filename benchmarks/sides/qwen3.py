"""The layers of a draft as transformers configures them, for the peers whose classes take that."""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from benchmarks.sides.problem import Sizes


def qwen3_config(sizes: Sizes, attention: str, **own: object) -> Qwen3Config:
    """The config of the draft's layers for transformers. attention: its implementation; own: further fields."""
    config = Qwen3Config(
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=2 * sizes.context,
        **own,
    )
    config._attn_implementation = attention
    return config
