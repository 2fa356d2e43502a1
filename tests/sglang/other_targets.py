"""Tiny targets beyond Qwen's families that SGLang loads on a CPU: a row of CASES each, with what it needs besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_targets import EXPERTS, LOCAL, MLA, PER_LAYER, ROUTED, published_checkpoint
from attrs import field, frozen
from dflash_cases import NOISE
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2Moe

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 40,
}
SAME_HEADS = {"head_dim": 16, "global_head_dim": 16}
BY_GROUPS = {**ROUTED, "topk_method": "group_limited_greedy"}


def not_routed_by_groups() -> str:
    """Why the installed transformers cannot route DeepSeek V2's tokens by groups of experts; empty if it can.

    The class of 5.12.1 reads `num_experts`, which it never sets.
    """
    try:
        DeepseekV2Moe(DeepseekV2Config(hidden_size=8, num_attention_heads=2, **BY_GROUPS))(torch.zeros(1, 1, 8))
    except AttributeError as error:
        return f"transformers {transformers.__version__} cannot run DeepSeek V2, to compare with: {error}"
    return ""


@frozen(kw_only=True)
class Case:
    """fields: of the tiny config. published, embedding: see published_checkpoint. tolerance: of a token's states,
    relative to their norm. slow: another case runs the same code of SGLang's. noise: of a draft that is neither
    good nor bad, the first that is tried. without_reference: why the installed transformers cannot run it; empty if it
    can.
    """

    fields: Mapping[str, Any] = field(factory=dict)
    published: Mapping[str, Any] = field(factory=dict)
    tolerance: float = 1e-5
    embedding: float = 1.0
    noise: float = NOISE
    slow: bool = False
    without_reference: Callable[[], str] = str


CASES: dict[str, Case] = {
    "llama": Case(),
    "mistral": Case(slow=True),
    "ministral3": Case(noise=0.4, slow=True),
    "phi3": Case(slow=True),
    # With larger rows one of the tested answers ends after five tokens.
    "qwen2": Case(embedding=0.3),
    "qwen2_moe": Case(fields={**EXPERTS, "shared_expert_intermediate_size": 40}, slow=True),
    # SGLang keeps its sinks in bfloat16, so the test rounds the checkpoint's.
    "gpt_oss": Case(),
    "gemma3_text": Case(embedding=0.1, noise=0.4),
    "gemma4_text": Case(
        embedding=0.1,
        noise=0.4,
        fields={**SAME_HEADS, **LOCAL, **PER_LAYER},
        published={"swa_head_dim": 16, "swa_v_head_dim": 16, "v_head_dim": 16, "swa_num_key_value_heads": 2},
    ),
    "deepseek_v2": Case(
        fields={**MLA, **BY_GROUPS},
        published={"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "group_limited_greedy"},
        tolerance=5e-5,
        slow=True,
        without_reference=not_routed_by_groups,
    ),
    "deepseek_v3": Case(
        fields={"rope_parameters": YARN},
        published={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        tolerance=5e-5,
    ),
    "glm4_moe": Case(fields={"head_dim": 16, **ROUTED}),
    "glm4_moe_lite": Case(fields={**MLA, **ROUTED}, tolerance=1e-4),
    "lfm2": Case(fields=CONVOLUTIONS, noise=0.8),
    "lfm2_moe": Case(fields={**EXPERTS, "num_dense_layers": 1, **CONVOLUTIONS}, slow=True),
    "qwen3_next": Case(
        fields={**EXPERTS, **LINEAR, "head_dim": 16, "num_hidden_layers": 8},
        published={"full_attention_interval": 4},
        tolerance=2.5e-4,
    ),
    # SGLang keeps the two numbers of its activation in bfloat16.
    "apertus": Case(tolerance=3e-3, slow=True),
}
IN_BFLOAT16 = (".sinks",)  # ends of names of what SGLang rounds, and the checkpoint has in float32


def other_checkpoint(kind: str, folder: Path, **fields: Any) -> Path:
    """The tiny checkpoint of a row of CASES, as `load_target` would complete it.

    Skips the test where the installed transformers cannot run it.
    """
    case = CASES[kind]
    if reason := case.without_reference():
        pytest.skip(reason)
    checkpoint = published_checkpoint(kind, folder, case.published, case.embedding, **{**case.fields, **fields})
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.endswith(IN_BFLOAT16):
            tensors[name] = weight.bfloat16().to(weight.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return checkpoint
