"""Tiny targets beyond Qwen's families that vLLM runs on a CPU: a row of ROWS each, with what it needs besides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from any_targets import EXPERTS, LOCAL, PER_LAYER, ROUTED, published_checkpoint
from attrs import field, frozen

from ops.lib.vllm.serve_command import BY_TRANSFORMERS

HEADS = {"head_dim": 32}  # a size that vLLM's attention takes on a CPU
WIDE = {"hidden_size": 128}  # the same, for types whose heads share the hidden size
LATENT = {  # the sizes that its latent attention takes on a CPU
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
GROUPS = {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "group_limited_greedy"}
NO_AUX = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@frozen(kw_only=True)
class Row:
    """fields: of the tiny config. published, embedding: see published_checkpoint. tolerance: of a token's states,
    relative to their norm.
    """

    fields: Mapping[str, Any] = field(factory=dict)
    published: Mapping[str, Any] = field(factory=dict)
    embedding: float = 1.0
    tolerance: float = 2e-5

    @property
    def is_latent(self) -> bool:
        return "kv_lora_rank" in self.fields


ROWS: dict[str, Row] = {
    "llama": Row(fields=HEADS),
    "mistral": Row(fields=HEADS),
    "ministral3": Row(fields=HEADS),
    "phi3": Row(fields=WIDE),
    "qwen2": Row(fields=WIDE),
    "qwen2_moe": Row(fields={**WIDE, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "gpt_oss": Row(fields=HEADS),
    "gemma3_text": Row(fields=HEADS, embedding=0.1),
    "gemma4_text": Row(fields={**HEADS, "global_head_dim": 32, **LOCAL, **PER_LAYER}, embedding=0.1),
    "deepseek_v2": Row(fields={**LATENT, **ROUTED, "topk_method": "group_limited_greedy"}, published=GROUPS),
    "deepseek_v3": Row(fields=LATENT, published=NO_AUX),
    "glm4_moe": Row(fields={**HEADS, **ROUTED}),
    "glm4_moe_lite": Row(fields={**LATENT, **ROUTED}),
    # vLLM keeps two numbers of the activation in bfloat16.
    "apertus": Row(fields=WIDE, tolerance=3e-3),
    "granite": Row(fields=WIDE),
    "olmo2": Row(fields=WIDE),
    "smollm3": Row(fields=WIDE),
    "cohere2": Row(fields=WIDE),
}


def model_impl(kind: str) -> str:
    """vLLM's argument for this type of target, as dflow gives it; "auto" takes vLLM's own class if there is one."""
    return "transformers" if kind in BY_TRANSFORMERS else "auto"


def vllm_checkpoint(kind: str, folder: Path, **fields: Any) -> Path:
    """The tiny checkpoint of a row of ROWS."""
    row = ROWS[kind]
    return published_checkpoint(kind, folder, row.published, row.embedding, **{**row.fields, **fields})
