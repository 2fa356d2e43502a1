"""Which targets the sglang backend captures: those whose class in the installed SGLang keeps the inputs of its layers.

Torch-free: `dflow plan` checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsl.errors import ConfigError, DataError
from ops.lib.sglang.model_classes import ModelClass, not_run, served_class
from ops.lib.vision.family_config import check_served_config, patch_dim, text_part

if TYPE_CHECKING:
    from ops.capture_targets.op import CaptureTargets

INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
PATCH_DIM_OF_QWEN25 = 1176  # the only width of pixel rows that SGLang's Qwen2.5-VL interprets as pixels


# Their captured states equal those of transformers (tests/sglang); the class of any other is read only.
COMPARED = frozenset(
    {
        *("qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen2", "qwen2_moe"),
        *("llama", "mistral", "ministral3", "phi3", "gpt_oss", "gemma3_text", "gemma4_text"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "lfm2", "lfm2_moe", "apertus"),
    }
)
REMEDY = 'use backend = "huggingface"'


def capture_note(config: Mapping[str, Any]) -> str | None:
    """A note on how SGLang captures a target, and whether that was compared with transformers; None without SGLang."""
    found = served_class(config)
    if found is None:
        return None
    if config.get("model_type") in COMPARED:
        return found.sentence
    return f"{found.sentence}; not compared with transformers yet; to compare them: dflow doctor FILE --backends"


def check_class(config: Mapping[str, Any]) -> ModelClass | None:
    """The class of the installed SGLang that captures a target; None without SGLang. Raises DataError without such a
    class, and for images of a family that is not Qwen's.
    """
    if reason := not_run(config):
        raise DataError(f"{reason}: {REMEDY}")
    return served_class(config)


def check_config(config: Mapping[str, Any], options: CaptureTargets) -> None:
    """Check that the installed SGLang captures this kind of target, and that ranks can share it.

    Raises DataError for the target, and ConfigError for the ranks.
    """
    model_type, remedy = config.get("model_type"), REMEDY
    check_class(config)
    seeing, text = config.get("vision_config"), text_part(config)
    if model_type == "qwen2_5_vl" and seeing and patch_dim(seeing) != PATCH_DIM_OF_QWEN25:
        raise DataError(
            f"SGLang's Qwen2.5-VL interprets pixel rows of {PATCH_DIM_OF_QWEN25} numbers as pixels, others as "
            f"embeddings, and the target's have {patch_dim(seeing)}: {remedy}"
        )
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if model_type in INTERLEAVED and seeing and not rope.get("mrope_interleaved"):
        raise DataError(
            f"config.json: the rope_parameters of this {model_type} lack mrope_interleaved = true; transformers "
            "rotates that way by default, but SGLang does not, so images would have other states: add it, or "
            f"{remedy}"
        )
    check_served_config(config)
    check_degree(config, options.tp_degree, int((options.server_args or {}).get("ep_size", 1)))


def check_degree(config: Mapping[str, Any], tp_degree: int, ep_size: int = 1) -> None:
    """Check that ranks can share a target of this config.json evenly, by SGLang's rule. Raises ConfigError.

    Ranks have equal numbers of query heads and of columns of each MLP. Key/value heads are divided, or replicated if
    there are fewer of them than ranks.
    """
    text, seeing = text_part(config), config.get("vision_config") or {}
    dense = not text.get("num_experts") or bool(text.get("mlp_only_layers"))
    names = ["num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size"]
    named = {name: text.get(name) for name in [*names, *(["intermediate_size"] if dense else [])]}
    named |= {f"vision_config.{name}": seeing.get(name) for name in ("num_heads", "intermediate_size")}
    uneven = [f"{name} = {size}" for name, size in named.items() if size and size % tp_degree]
    columns = text.get("moe_intermediate_size")
    if columns and columns % max(1, tp_degree // ep_size):  # whole experts are dealt out first
        uneven.append(f"moe_intermediate_size = {columns}")
    shared = text.get("num_key_value_heads")
    if shared and shared % tp_degree and tp_degree % shared:
        uneven.append(f"num_key_value_heads = {shared}")
    if uneven:
        raise ConfigError(
            f"tp_degree = {tp_degree} does not divide {', '.join(uneven)} of the target's config.json, so "
            "these ranks cannot share it: change tp_degree"
        )
