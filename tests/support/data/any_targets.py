"""Tiny random checkpoints of any text architecture of transformers, saved as published ones are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ops.lib.data.files import read_json, write_json
from ops.lib.target.model import complete_config
from ops.tokenize_chat.builtin import SPECIAL_TOKENS, write_builtin_processor

LAYERS = 6
SIZES = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    "bos_token_id": SPECIAL_TOKENS.index("<|im_start|>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
}
PROSE = (
    "The picture shows a red square beside a green circle, and the line below it is blue.",
    "What is it? Describe the image in a few words, then count what can be seen on it.",
    "There are three of them: one is large, two are small, and all of them are yellow.",
)
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 8}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 400, "num_kv_shared_layers": 2}
# Types whose sizes need more than SIZES: what differs, by model type.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,  # as in published configs, which SGLang 0.5.21 reads; transformers knows it without
    },
    "glm4": {"head_dim": 16},
    "deepseek_v3": {**MLA, **ROUTED},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.25},
}


def tiny_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """The config of a tiny model of this type."""
    return AutoConfig.for_model(model_type, **{**SIZES, **OTHERS.get(model_type, {}), **fields})


def tiny_model(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A tiny model with weights so large that every token depends on all tokens before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **fields))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim >= 2:
                    ends = "embed" in name
                    weight.normal_(std=0.3 if ends else 2 * weight.shape[-1] ** -0.5)
    return model.eval()


def any_checkpoint(model_type: str, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a tiny checkpoint and its tokenizer."""
    conversations = [[{"role": "user", "content": [{"type": "text", "text": line}]}] for line in PROSE]
    write_builtin_processor(folder, conversations, 360)
    (folder / "preprocessor_config.json").unlink()
    tiny_model(model_type, seed, **fields).save_pretrained(folder)
    return folder


def published_checkpoint(
    model_type: str,
    folder: Path,
    published: Mapping[str, Any] = MappingProxyType({}),
    embedding: float = 1.0,
    **fields: Any,
) -> Path:
    """Write a tiny checkpoint as `load_target` would complete it.

    published: of config.json besides; checkpoints that transformers saves lack fields that published ones have and
    engines read. embedding: a factor of its weight; scaled rows that are tied to the head would outweigh all layers,
    and every answer would repeat a token.
    """
    checkpoint = any_checkpoint(model_type, folder, **fields)
    config, file = checkpoint / "config.json", checkpoint / "model.safetensors"
    write_json(config, read_json(config) | dict(published))
    tensors = load_file(file)
    for name, weight in tensors.items():
        if "embed_tokens" in name:
            weight *= embedding
    save_file(tensors, file, metadata={"format": "pt"})
    complete_config(checkpoint)
    return checkpoint


def numbered_rows(file: Path, count: int) -> Path:
    """Write short conversations of text, the first for test, the second for val, the others for train."""
    rows = [
        {
            "id": f"text-{index}",
            "split": ("test", "val", "train")[min(index, 2)],
            "messages": [
                {"role": "user", "content": f"Say {index}."},
                {"role": "assistant", "content": f"The number is {index}. " * 5},
            ],
        }
        for index in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
