"""Published targets by their config.json alone: the parameters that their publishers state, and a draft's shape.

A row holds what the published file says of sizes; the rest is left to its class, as in `plan` of a model id.
"""

from __future__ import annotations

from typing import Any

import pytest

from dsl.op import Ref
from ops.lib.target.probe import probe_config
from ops.lib.target.probed import LAYERS
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
GLM45: dict[str, Any] = {"head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, **UNTIED}
GLM45_AIR = {"n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, **GLM45}
GLM45_LARGE = {"n_routed_experts": 160, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, **GLM45}
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
    "GLM-4.5": (355.0, CARD, sizes("glm4_moe", 151_552, 5120, 12_288, 92, 96, 8, **GLM45_LARGE)),
    "GLM-4.5-Air": (106.0, CARD, sizes("glm4_moe", 151_552, 4096, 10_944, 46, 96, 8, **GLM45_AIR)),
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
GLM47_FLASH: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    **UNTIED,
}


def gemma4(
    window_layers: int, tower: dict[str, int], hears: bool, text: dict[str, Any], **others: Any
) -> dict[str, Any]:
    """A file of Gemma 4, with `window_layers` between two layers that see everything."""
    kinds = ["sliding_attention"] * window_layers + ["full_attention"]
    written = {
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": kinds * (text["num_hidden_layers"] // len(kinds)),
    }
    return {
        "model_type": "gemma4",
        "text_config": {**text, **written, **others},
        "vision_config": {"model_type": "gemma4_vision", **tower},
        "audio_config": {"model_type": "gemma4_audio"} if hears else None,
        **TIED,
    }


def tower(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    sides = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, **sides}


def llama4(experts: int, every: int) -> dict[str, Any]:
    """A file of Llama 4, with experts in each layer or in each second one. Its images are not read."""
    routed = {"num_local_experts": experts, "interleave_moe_layer_step": every, "num_experts_per_tok": 1}
    text = sizes("llama4_text", 202_048, 5120, 8192, 48, 40, 8, head_dim=128, intermediate_size_mlp=16_384, **routed)
    return {"model_type": "llama4", "text_config": text, "vision_config": {"model_type": "llama4_vision_model"}}


ENCODER = 0.55  # of images: the card has it in a row of its own
SMALL_TOWER, LARGE_TOWER = tower(768, 3072, 16, 12), tower(1152, 4304, 27, 16)
BY_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
NOT_SHARED = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
ROUTED = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
GEMMA4_E2B = gemma4(
    *(4, SMALL_TOWER, True, sizes("gemma4_text", 262_144, 1536, 6144, 35, 8, 1)),
    **BY_LAYER,
    num_kv_shared_layers=20,
    use_double_wide_mlp=True,
)
GEMMA4_E4B = gemma4(
    *(5, SMALL_TOWER, True, sizes("gemma4_text", 262_144, 2560, 10_240, 42, 8, 2)), **BY_LAYER, num_kv_shared_layers=18
)
GEMMA4_31B = gemma4(
    *(5, LARGE_TOWER, False, sizes("gemma4_text", 262_144, 5376, 21_504, 60, 32, 16)),
    **NOT_SHARED,
    num_global_key_value_heads=4,
)
GEMMA4_26B = gemma4(
    *(5, LARGE_TOWER, False, sizes("gemma4_text", 262_144, 2816, 2112, 30, 16, 8)),
    **NOT_SHARED,
    **ROUTED,
    num_global_key_value_heads=2,
)
# Counted by a model without weights, which takes ten seconds each.
BY_MODEL: dict[str, tuple[float, str, dict[str, Any]]] = {
    "Gemma-3-4B": (4.3, REPORT, GEMMA3_4B),
    "LFM2-1.2B": (1.17, CARD, LFM2),
    "GLM-4.7-Flash": (30.0, CARD, sizes("glm4_moe_lite", 154_880, 2048, 10_240, 47, 20, 20, **GLM47_FLASH)),
    "Gemma-4-E2B": (5.1, CARD, GEMMA4_E2B),
    "Gemma-4-E4B": (8.0, CARD, GEMMA4_E4B),
    "Gemma-4-31B": (30.7 + ENCODER, CARD, GEMMA4_31B),
    "Gemma-4-26B-A4B": (25.2 + ENCODER, CARD, GEMMA4_26B),
    "Llama-4-Scout": (109.0, CARD, llama4(16, 1)),
    "Llama-4-Maverick": (400.0, CARD, llama4(128, 2)),
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


# With ids of a class beyond a copy's vocabulary, and with all sizes left to the class.
PROBED_OFTEN = ("Phi-3-mini-4k", "Phi-4", "GLM-4-9B-0414", "SmolLM3-3B", "DeepSeek-V3")


def check_copy(config: dict[str, Any]) -> None:
    failed = probe_config(with_defaults(config)).failed
    assert [LAYERS] * (config["model_type"] == "llama4") == [check.name for check in failed]


@pytest.mark.parametrize("name", PROBED_OFTEN)
def test_what_a_published_config_leaves_to_its_class_is_small_in_a_copy(name: str) -> None:
    check_copy(PUBLISHED[name][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in {**PUBLISHED, **BY_MODEL} if name not in PROBED_OFTEN])
def test_all_of_a_small_copy_of_a_published_config_holds(name: str) -> None:
    check_copy({**PUBLISHED, **BY_MODEL}[name][2])


def test_thirty_one_are_compared() -> None:
    assert 22 == len(PUBLISHED) and 9 == len(BY_MODEL)
