"""Published targets by their config.json alone: the parameters that their publishers state, and a draft's shape.

A row holds what the published file says of sizes; the rest is left to its class, as in `plan` of a model id.
"""

from __future__ import annotations

from typing import Any

import pytest

from dsl.op import Ref
from ops.lib.target.sizes import BY_CONFIG, TargetSizes
from ops.lib.vision.family_config import QWEN, with_defaults
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.shape import forecast_shape

CARD, FILES, REPORT = "the model card", "the parameters that the Hub counts in its files", "the technical report"


def sizes(
    kind: str, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
DEEPSEEK_LITE: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
# Name: billions of parameters, who states them, and the config.json.
PUBLISHED: dict[str, tuple[float, str, dict[str, Any]]] = {
    "Llama-3.1-8B": (8.03, FILES, sizes("llama", 128_256, 4096, 14_336, 32, 32, 8)),
    "Llama-3.2-1B": (1.23, CARD, sizes("llama", 128_256, 2048, 8192, 16, 32, 8, head_dim=64, **TIED)),
    "Mistral-7B-v0.3": (7.25, FILES, sizes("mistral", 32_768, 4096, 14_336, 32, 32, 8)),
    "Mixtral-8x7B": (46.7, REPORT, sizes("mixtral", 32_000, 4096, 14_336, 32, 32, 8, num_local_experts=8)),
    "Gemma-2-9B": (9.24, REPORT, sizes("gemma2", 256_000, 3584, 14_336, 42, 16, 8, head_dim=256)),
    "gpt-oss-20b": (20.9, CARD, sizes("gpt_oss", 201_088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32)),
    "Qwen2.5-7B": (7.61, CARD, sizes("qwen2", 152_064, 3584, 18_944, 28, 28, 4, **UNTIED)),
    "Qwen3-8B": (8.2, CARD, sizes("qwen3", 151_936, 4096, 12_288, 36, 32, 8, head_dim=128, **UNTIED)),
    "Qwen3-30B-A3B": (30.5, CARD, sizes("qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, **QWEN3_MOE, **UNTIED)),
    "Phi-3-mini-4k": (3.82, FILES, sizes("phi3", 32_064, 3072, 8192, 32, 32, 32)),
    "Phi-4": (14.7, FILES, sizes("phi3", 100_352, 5120, 17_920, 40, 40, 10)),
    "GLM-4-9B-0414": (9.4, FILES, sizes("glm4", 151_552, 4096, 13_696, 40, 32, 2, head_dim=128, **UNTIED)),
    "DeepSeek-V2-Lite": (15.7, CARD, sizes("deepseek_v2", 102_400, 2048, 10_944, 27, 16, 16, **DEEPSEEK_LITE)),
    "DeepSeek-V3": (671.0, CARD, {"model_type": "deepseek_v3"}),
    "SmolLM2-135M": (0.135, CARD, sizes("llama", 49_152, 576, 1536, 30, 9, 3, **TIED)),
    "SmolLM3-3B": (3.08, FILES, sizes("smollm3", 128_256, 2048, 11_008, 36, 16, 4)),
    "OLMo-2-7B": (7.3, CARD, sizes("olmo2", 100_352, 4096, 11_008, 32, 32, 32, **UNTIED)),
    "Granite-3.1-8B": (8.17, FILES, sizes("granite", 49_155, 4096, 12_800, 40, 32, 8, **TIED)),
    "Command-R7B": (8.03, FILES, sizes("cohere2", 256_000, 4096, 14_336, 32, 32, 8, head_dim=128)),
    "StarCoder2-3B": (3.03, FILES, sizes("starcoder2", 49_152, 3072, 12_288, 30, 24, 2)),
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
LFM2: dict[str, Any] = {
    **sizes("lfm2", 65_536, 2048, 12_288, 16, 32, 8),
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_auto_adjust_ff_dim": True,
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
# Counted by a model without weights, which takes ten seconds each.
BY_MODEL: dict[str, tuple[float, str, dict[str, Any]]] = {
    "Gemma-3-4B": (4.3, REPORT, GEMMA3_4B),
    "LFM2-1.2B": (1.17, CARD, LFM2),
}


def check(billions: float, config: dict[str, Any]) -> None:
    complete = with_defaults(config)
    found = TargetSizes.of(complete)
    assert 0.02 > abs(found.parameters / (billions * 1e9) - 1)
    fields = {"features": Ref("f"), "batches": Ref("b"), "target": Ref("t"), "block_size": 16, "num_layers": 5}
    shape = forecast_shape(TrainDflash(**fields), complete, 5)
    assert (found.text["hidden_size"], found.text["num_hidden_layers"]) == (shape.hidden_size, shape.num_target_layers)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_alone_gives_the_stated_parameters(name: str) -> None:
    billions, _, config = PUBLISHED[name]
    assert config["model_type"] in (*BY_CONFIG, *QWEN)
    check(billions, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_MODEL)
def test_a_published_config_that_the_formulas_do_not_know_gives_them_too(name: str) -> None:
    billions, _, config = BY_MODEL[name]
    assert config["model_type"] not in (*BY_CONFIG, *QWEN)
    check(billions, config)


def test_at_least_twenty_are_compared() -> None:
    assert 20 <= len(PUBLISHED)
