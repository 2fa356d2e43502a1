"""Tiny random models of the kinds of caches that targets have, as loaded targets with prompts."""

from __future__ import annotations

from typing import Any

import torch
from family_checkpoints import HIDDEN, LAYERS, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

from ops.lib.data.token_shards import TokenSample
from ops.lib.target.model import Target
from ops.lib.target.verify import Verification
from ops.lib.vision.families import Family

WINDOW = 8  # shorter than the prompts
PROMPTS = (19, 11, 27)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,  # tied, random weights repeat the last token
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA4 = {**HEAD, **MIXED, "global_head_dim": 16, "vocab_size_per_layer_input": VOCABULARY}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_proj_bias": False,
}
BATCH, BLOCK, TOKEN = Verification
# name -> what it differs in, and how it verifies; the type is the name's first word
CACHES: dict[str, tuple[dict[str, Any], Verification]] = {
    "llama": (HEAD, BATCH),
    "llama eager": (HEAD, BATCH),
    "mistral": ({**HEAD, "sliding_window": WINDOW}, BATCH),
    "gemma2 eager": ({**HEAD, **MIXED, "query_pre_attn_scalar": 8}, BATCH),
    "gemma3_text": ({**HEAD, **MIXED, "query_pre_attn_scalar": 8}, BATCH),
    "gemma4_text": ({**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, BATCH),
    "gemma4_text shared": ({**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}, BATCH),
    "gpt_oss eager": ({**HEAD, **MIXED, **LOCAL_EXPERTS}, BATCH),
    "cohere2": (MIXED, BATCH),
    "qwen3_next": ({**HEAD, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}, BLOCK),
    "lfm2": (
        {
            "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        TOKEN,
    ),
    "granitemoehybrid": (
        {
            **MAMBA,
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention"] * (LAYERS // 2),
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
        TOKEN,
    ),
    "bamba": ({**MAMBA, "attn_layer_indices": [1, 3, 5]}, TOKEN),
    "jamba": (
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
        TOKEN,
    ),
    "falcon_h1": ({**HEAD, **MAMBA, "mamba_d_ssm": 64}, TOKEN),
}
# models that do not take a DynamicCache
OWN_CACHES: dict[str, dict[str, Any]] = {
    "minimax": {**HEAD, **LOCAL_EXPERTS, "layer_types": LINEAR["layer_types"], "block_size": 8},
    "olmo_hybrid": {**LINEAR, "linear_num_key_heads": 4},
}


def cache_target(name: str, dtype: torch.dtype = torch.float64) -> Target:
    """A target that does not stop at EOS."""
    model_type, *words = name.split()
    changes = CACHES[name][0] if name in CACHES else OWN_CACHES[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    torch.manual_seed(0)
    attention = "eager" if "eager" in words else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=dtype, experts_implementation="eager"
    )
    info = {"hidden_size": HIDDEN, "num_layers": LAYERS, "eos_token_ids": []}
    return Target(model.eval().requires_grad_(False), info, torch.device("cpu"), Family(config.to_dict()))


def cache_case(name: str, dtype: torch.dtype = torch.float64) -> tuple[Target, list[TokenSample]]:
    """A target by name, and prompts of different lengths."""
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=random) for length in PROMPTS]
    return cache_target(name, dtype), [text_sample(f"prompt {place}", ids) for place, ids in enumerate(prompts)]


def text_sample(name: str, input_ids: torch.Tensor) -> TokenSample:
    """A prompt without images."""
    return TokenSample(
        id=name,
        category="text",
        input_ids=input_ids,
        loss_mask=torch.zeros(len(input_ids), dtype=torch.bool),
        pixel_values=torch.empty(0, 0),
        image_grid_thw=torch.empty(0, 3, dtype=torch.int64),
        prompt_tokens=len(input_ids),
    )
