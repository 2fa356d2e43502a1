"""What a target makes of a row of its embedding and of the product with its head, by its config.json. Loads no torch.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from ops.lib.vision.family_config import SOFT_CAPS, text_part


@frozen
class HeadSettings:
    """What a target makes of the product of its final state with the head: x = scale * (h W^T + b), and with a soft cap
    soft_cap * tanh(x / soft_cap). bias: whether there is a b, a tensor beside the head's weight.
    """

    scale: float = 1.0
    soft_cap: float | None = None
    bias: bool = False


PLAIN = HeadSettings()


BIASED_HEADS = ("phi", "gptj", "codegen")  # by their classes, without a field
BIAS_OF_ALL = ("ernie4_5_moe",)  # whose use_bias is of the head too


def head_settings(config: Mapping[str, Any]) -> HeadSettings:
    """The settings of a target's head by its complete config.json, as `load_target` writes it."""
    text = text_part(config)
    scale = _first(text.get("logit_scale"), text.get("lm_head_multiplier"), 1.0)
    if text.get("logits_scaling"):
        scale = text["logits_scaling"] if text.get("model_type") == "hyperclovax" else 1.0 / text["logits_scaling"]
    kind = text.get("model_type")
    bias = text.get("lm_head_bias", kind in BIASED_HEADS or (kind in BIAS_OF_ALL and text.get("use_bias")))
    return HeadSettings(
        float(scale),
        _first(*(text.get(name) for name in SOFT_CAPS)),
        bool(bias),
    )


def embedding_scale(config: Mapping[str, Any]) -> float:
    """What a target multiplies a row of its embedding's weight by, by its complete config.json."""
    text = text_part(config)
    kind = str(text.get("model_type"))
    if kind.startswith(SQUARE_ROOT) or (kind == "afmoe" and text.get("mup_enabled")):
        return float(text["hidden_size"] ** 0.5)
    return float(_first(text.get("embedding_multiplier"), 1.0))


SQUARE_ROOT = ("gemma", "recurrent_gemma", "vaultgemma", "t5gemma")  # model types that scale it by sqrt(hidden_size)


SCALED_INSIDE = ("gemma3", "gemma4")  # beginnings of model types whose embedding SGLang's own module scales


def sglang_embedding_scale(config: Mapping[str, Any]) -> float:
    """What SGLang 0.5.23 multiplies a draft's rows of the target's embedding by: its worker calls the target's module,
    which knows the scale or leaves it to the model around it. config: the target's complete config.json.
    """
    kind = str(text_part(config).get("model_type"))
    return embedding_scale(config) if kind.startswith(SCALED_INSIDE) else 1.0


SCALED_IN_VLLM = ("gemma3_text", "gemma4_text")  # of the types that dflow has vLLM run by transformers' models


def vllm_embedding_scale(config: Mapping[str, Any]) -> float:
    """What vLLM 0.33 multiplies a draft's rows of the target's embedding by: transformers' module scales them, and its
    own classes leave the scale to the model around it. config: the target's complete config.json.
    """
    return embedding_scale(config) if config.get("model_type") in SCALED_IN_VLLM else 1.0


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
