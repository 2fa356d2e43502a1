"""The model types of the families of targets, and what a config.json of each must have. Loads no torch.

Qwen's families are listed here. Any other model type with a head for the next token is of the general text family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError
from ops.lib.data.files import shown_json
from ops.lib.vision.config_classes import ConfigClass, class_named, class_of, has_language_model

QWEN3 = ("qwen3", "qwen3_moe")
QWEN25_VL = ("qwen2_5_vl",)
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
QWEN35 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
QWEN = (*QWEN3, *QWEN25_VL, *QWEN3_VL, *QWEN35)
# Types whose images are read too, by their own processors; a row for each in tests/support/data/seeing_targets.py.
SEEING = ("gemma3", "gemma4", "idefics3", "lfm2_vl", "llava_onevision", "smolvlm")
BY_TORCHVISION = ("lfm2_vl",)  # those whose image processor needs torchvision
# Beginnings of names of tensors that do not belong to the language model: its images, and several tokens at once.
VISUAL, MTP = "visual.", "mtp."
OF_IMAGES = ("vision", "visual", "projector", "connector", "image")  # parts of names, of other families
MASK_TOKENS = ("<|mask|>", "<|MASK|>")  # of tokenizers that have one
# Ids that no text of a family gives: 151669 lies beyond the tokenizers of Qwen3 and Qwen2.5-VL.
QWEN3_MASK_ID, QWEN35_MASK_ID = 151669, 248070

# The fields of a text config that dflow reads, and that a file may leave to its class.
LEFT_OUT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "norm_eps",
    "layer_norm_eps",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "lm_head_bias",
    "embedding_multiplier",
)
# Others that count parameters before there are files, of latent attention and of experts, or limit texts.
COUNTED = (
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "moe_intermediate_size"),
    *("first_k_dense_replace", "n_shared_experts", "num_shared_experts"),
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
    "original_max_position_embeddings",
)
TIED = "tie_word_embeddings"


def is_qwen(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of one of Qwen's families; one without a model type is taken for one."""
    return config.get("model_type", QWEN3[0]) in QWEN


def sees_by_name(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model whose images are read by its own processor (any_images.py)."""
    return config.get("model_type") in SEEING and config.get("vision_config") is not None


def image_token_of(config: Mapping[str, Any]) -> int | None:
    """The id of image tokens in a config.json that `sees_by_name`; None if neither it nor its class names it."""
    of = class_of(config.get("model_type"))
    names = ("image_token_id", "image_token_index")
    found = (each.get(name) for each in (config, of.defaults) for name in names)
    return next((token for token in found if isinstance(token, int)), None)


def check_model_type(config: Mapping[str, Any]) -> None:
    """Raises DataError for a config.json of a model that does not predict tokens, or that transformers does not know;
    a checkpoint's own code may define it.
    """
    kind = config.get("model_type")
    if kind in QWEN or has_language_model(kind) or (isinstance(kind, str) and config.get("auto_map")):
        return
    raise DataError(
        f"model_type {shown_json(kind)}: the installed transformers has no language model of this type; a later "
        "version may have it"
    )


def family_mask_id(model_type: str) -> int | None:
    """The mask token of one of Qwen's families; None for other model types."""
    if model_type not in QWEN:
        return None
    return QWEN35_MASK_ID if model_type in QWEN35 else QWEN3_MASK_ID


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: text_config if there is one, else the whole."""
    return config.get("text_config") or config


def vision_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a config.json that describes a vision tower that dflow reads; None for others and for none."""
    return config.get("vision_config") if is_qwen(config) else None


def patch_dim(vision: Mapping[str, Any]) -> int:
    """The length of a row of pixel values, from vision_config."""
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    return int(channels * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2)


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with the defaults of its class for the fields of LEFT_OUT and COUNTED that it lacks.

    Published files lack them: those of Gemma 3 name neither a vocabulary nor heads. Qwen's stay as they are, and what a
    class does not say stays missing.
    """
    kind, inner, whole = config.get("model_type"), config.get("text_config"), dict(config)
    if is_qwen(config):
        return whole
    top = class_of(kind)
    if TIED not in whole and not (isinstance(inner, Mapping) and TIED in inner) and TIED in top.defaults:
        whole[TIED] = top.defaults[TIED]
    if not isinstance(inner, Mapping):
        return {**_defaults(config, top), **whole}
    own = inner.get("model_type")
    text = class_of(own) if own else class_named(str(kind), top.text_class)
    return whole | {"text_config": {**_defaults(inner, text), **inner}}


def _defaults(text: Mapping[str, Any], of: ConfigClass) -> dict[str, Any]:
    """The fields that the text lacks, by the other name that it has of them or by the class; and the rope's theta."""
    found = {}
    for name in (*LEFT_OUT, *COUNTED):
        real = of.aliases.get(name, name)
        value = text.get(real, of.defaults.get(real))
        if name not in text and value is not None:
            found[name] = value
    if "num_hidden_layers" not in {**found, **text} and text.get("layers_block_type"):  # Nemotron-H: that many
        found["num_hidden_layers"] = len(text["layers_block_type"])
    theta = of.defaults.get("default_theta")
    if theta and not text.keys() & {"rope_parameters", "rope_theta"}:
        found["rope_theta"] = theta.get("global") if isinstance(theta, Mapping) else theta
    return found


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a config.json makes the embedding the head: at the top level, or else in text_config. Qwen's classes have
    false where neither says it; for other model types `with_defaults` has filled it in.
    """
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings", False) if isinstance(text, Mapping) else False
    return bool(config.get("tie_word_embeddings", inner))


# Kinds of layers with a state that one token after the other changes, and beginnings of fields that only they have.
RECURRENT = ("mamba", "linear_attention", "conv", "recurrent", "hybrid")
OF_RECURRENT = ("mamba_", "linear_", "conv_L_cache", "lru_width", "ssm_")


def has_recurrent_layers(text: Mapping[str, Any]) -> bool:
    """Whether the text part of a config.json has layers with a recurrent state."""
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    if kinds:
        return any(kind in RECURRENT for kind in kinds)
    return any(name.startswith(OF_RECURRENT) for name in text)


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
DEEPSTACK, DEPTH = (8, 16, 24), 27  # of the class in transformers


def check_family_config(config: Mapping[str, Any]) -> None:
    """Check a config for missing sizes and parts, and for values without effect or with another one. Raises
    DataError.
    """
    text = text_part(config)
    missing = [name for name in SIZES if name not in text]
    if missing:
        raise DataError(f"config.json: missing {', '.join(missing)}, also in text_config")
    if caps := [name for name in SOFT_CAPS if text.get(name) == 0]:
        raise DataError(f"config.json: {caps[0]} is 0, which makes all logits equal: set it to null for no soft cap")
    kind, seeing = config.get("model_type"), config.get("vision_config")
    if seeing is None:
        if kind in (*QWEN25_VL, *QWEN3_VL):
            raise DataError(f"config.json: a {kind} without vision_config")
        return
    if kind not in (*QWEN25_VL, *QWEN3_VL, *QWEN35):
        return
    missing = [f"vision_config.{name}" for name in ("patch_size",) if name not in seeing]
    missing += [name for name in ("image_token_id",) if name not in config]
    if missing:
        raise DataError(f"config.json: missing {', '.join(missing)}")
    if kind in QWEN3_VL:
        _check_deepstack(seeing)
        _check_experts(text)


def check_served_config(config: Mapping[str, Any]) -> None:
    """Check that SGLang loads a config as transformers does, given the fields that `for_serving` adds. Raises
    DataError.
    """
    kind, text, seeing = config.get("model_type"), text_part(config), config.get("vision_config")
    if kind == "qwen3_moe" and is_tied(config):
        raise DataError(
            "config.json: tie_word_embeddings is set, but SGLang's Qwen3-MoE does not support a tied head: it would "
            "silently use a random one; save the checkpoint untied, with lm_head.weight"
        )
    if kind in QWEN3_VL and seeing is not None and "moe_intermediate_size" in text:
        indexes = seeing.get("deepstack_visual_indexes", DEEPSTACK)
        if len(indexes) != 3:
            raise DataError(
                f"config.json: vision_config.deepstack_visual_indexes {list(indexes)}: SGLang supports only three in a "
                "Qwen3-VL with experts"
            )
    if kind not in QWEN35:
        return
    if seeing is None and not str(kind).endswith("_text"):
        raise DataError(
            f"config.json: a {kind} without vision_config, which SGLang would load with a vision tower of random "
            "weights; a text-only model has a model_type that ends in _text"
        )
    if full_attention_interval(text) is None:
        raise DataError(
            f"config.json: layer_types does not repeat at an interval, which SGLang requires: {text['layer_types']}"
        )


def full_attention_interval(text: Mapping[str, Any]) -> int | None:
    """The interval between layers with full attention, the last of each group; None if it varies."""
    kinds = text.get("layer_types")
    if kinds is None:
        return int(text.get("full_attention_interval", 4))
    interval = [*kinds, "full_attention"].index("full_attention") + 1
    regular = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(len(kinds))]
    return interval if regular == list(kinds) else None


def _check_deepstack(seeing: Mapping[str, Any]) -> None:
    """Check the deepstack indices: one at or past the vision tower's depth would have no effect. Raises DataError."""
    depth = seeing.get("depth", DEPTH)
    beyond = [index for index in seeing.get("deepstack_visual_indexes", DEEPSTACK) if index >= depth]
    if beyond:
        raise DataError(
            f"config.json: vision_config.deepstack_visual_indexes names the layers {beyond}, but the vision tower "
            f"has only {depth}"
        )


def _check_experts(text: Mapping[str, Any]) -> None:
    if "moe_intermediate_size" not in text:
        return
    expert, hidden = text["moe_intermediate_size"], text["hidden_size"]
    if hidden in (expert, 2 * expert):
        raise DataError(
            f"config.json: text_config.moe_intermediate_size {expert} makes square matrices with a hidden_size of "
            f"{hidden}, and transformers cannot tell their orientation"
        )
