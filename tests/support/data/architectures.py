"""The architectures of transformers that the tests of targets try, by their default configs."""

from __future__ import annotations

import json
from typing import Any

from transformers import AutoConfig

from ops.lib.target.probed import BLOCKS, HEAD, LAYERS, PADDING
from ops.lib.vision.family_config import with_defaults

# What published files of these types have, and their classes leave empty.
PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {"text_config": {"model_type": "cohere2", "logit_scale": 0.05}},  # by 1/16 two roundings are near
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64, "topk_group": 1, "n_group": 1},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "kimi_k2": {  # whose own class is one of DeepSeek V3's sizes
        "vocab_size": 163_840,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rope_theta": 50_000.0,
    },
    "granitemoehybrid": {
        "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4] * 4,
        "num_hidden_layers": 40,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
    },
    "nemotron": {"num_key_value_heads": 8},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625},
    "granitemoe": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 4, "num_hidden_layers": 16},
    "lfm2_moe": {
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 6,
        "num_hidden_layers": 24,
        "num_experts": 32,
        "num_dense_layers": 2,
    },
    "qwen2_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "glm4v": {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}}},
    "qwen2_5_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
}
# Of files whose model_type transformers does not have: the type that their class is.
TYPE_OF = {"kimi_k2": "deepseek_v3"}
OFTEN = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "glm4", "phi3", "deepseek_v3"),
    *("cohere", "granite"),
)
OTHERS = (
    *("mixtral", "ministral", "ministral3", "qwen2_moe", "qwen3_moe", "qwen3_next", "gemma", "gemma4_text", "glm"),
    *("glm4_moe", "glm4_moe_lite", "phi", "phimoe", "deepseek_v2", "deepseek_v32", "olmo", "olmo2", "olmo3", "olmoe"),
    *("flex_olmo", "cohere2", "granitemoe", "granitemoeshared", "smollm3", "stablelm", "starcoder2", "ernie4_5"),
    *("ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4", "exaone_moe", "seed_oss", "arcee", "apertus"),
    *("minimax_m2", "opt", "gpt_neox", "lfm2", "jamba", "falcon_h1", "helium", "vaultgemma", "persimmon"),
    *("hyperclovax", "afmoe", "nanochat", "solar_open", "cwm", "bitnet", "jais2", "mellum", "diffllama", "jetmoe"),
    *("biogpt", "glm_moe_dsa", "youtu", "qwen3_5_text", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"),
    *("granitemoehybrid", "bamba", "kimi_k2"),
)
# Those of which only the probe is tried: language models of targets that see images, and two of texts.
PROBED = ("llava", "llava_next", "llava_onevision", "internvl", "mistral3", "qwen2_vl", "glm4v", "lfm2_moe", "nemotron")
# Their first states are not rows of the embedding times a scale, which is what a draft of theirs gets all the same.
OTHER_ROWS = {"nanochat": "they are normalised", "opt": "positions are added", "biogpt": "positions are added"}
# The first check that fails, and a part of its sentence.
NOT = {
    "gpt2": (LAYERS, "dflow cannot find the layers of GPT2Model"),
    "falcon": (LAYERS, "dflow cannot find the layers of FalconModel"),
    "bloom": (LAYERS, "dflow cannot find the layers of BloomModel"),
    "mpt": (LAYERS, "dflow cannot find the layers of MptModel"),
    "llama4_text": (LAYERS, "dflow cannot find the layers of "),
    "gptj": (LAYERS, "dflow cannot find the layers of GPTJModel"),
    "longcat_flash": (LAYERS, "28 layers, and 4 by its config"),
    "deepseek_v4": (LAYERS, "its layers pass on states of shape [1, 14, 4, 64], and a draft is fed by [1, 14, 64]"),
    "minimax": (PADDING, "MiniMax uses cache of its own"),
    "nemotron_h": (BLOCKS, "of the largest value"),
    "recurrent_gemma": (PADDING, "of the largest value"),
    "doge": (LAYERS, "of the largest value"),
    "paligemma": (LAYERS, "of the largest value"),
    "mllama": (LAYERS, "dflow cannot find the layers of MllamaForCausalLM"),
    "gemma3n_text": (LAYERS, "its layers pass on states of shape [4, 1, 14, 64]"),
    "llama4": (LAYERS, "dflow cannot find the layers of Llama4ForCausalLM"),
    "mamba": (LAYERS, "of the largest value"),
    "mamba2": (LAYERS, "of the largest value"),
    "falcon_mamba": (LAYERS, "of the largest value"),
    "rwkv": (LAYERS, "dflow cannot find the layers of RwkvModel"),
    "xlstm": (LAYERS, "dflow cannot find the layers of xLSTMModel"),
    "zamba2": (BLOCKS, "of the largest value"),
    "aya_vision": (HEAD, "they differ by 95.0% of the largest value"),
    "bert": (LAYERS, "dflow cannot find the layers of BertModel"),
    "bart": (LAYERS, "12 layers, and 4 by its config"),
}


def config_of(kind: str) -> dict[str, Any]:
    """The default config of a type, as a complete config.json."""
    made = AutoConfig.for_model(TYPE_OF.get(kind, kind), **PUBLISHED.get(kind, {}))
    return with_defaults(json.loads(json.dumps(made.to_dict())))
