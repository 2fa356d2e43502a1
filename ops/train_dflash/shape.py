"""The shape of the draft: fields without a value in the op are the target's. Torch-free, for `dflow plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from dsl.errors import ConfigError
from ops.capture_targets.layers import spread_layers
from ops.lib.drafts.algorithms import PlainLogits, algorithm_class
from ops.lib.drafts.backbone.config import (
    FULL_ATTENTION,
    POSITIONS,
    SCALES,
    SLIDING_ATTENTION,
    DraftConfig,
    DraftConfigError,
)
from ops.lib.forecasts import FeaturesForecast
from ops.lib.target.head_settings import PLAIN, embedding_scale, head_settings
from ops.lib.target.token_ids import mask_of_texts
from ops.train_dflash.op import TrainDflash

OF_PARENT = (  # of a warm start's draft
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "rope_scaling",
    "partial_rotary_factor",
    "tie_word_embeddings",
    *SCALES,
)
AS_TARGET = "DFLASH"  # the engine whose drafts take scale and soft cap of the target's logits; others the plain product
UNBOUNDED = 2**31 - 1  # positions, where nothing is known of them
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps")  # the field's names in targets' configs
SCALED = "qwen"  # beginning of the model types whose scaled RoPE a new draft takes over
_ROPE_OTHERS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def draft_shape(
    config: TrainDflash,
    text: Mapping[str, Any],
    info: Mapping[str, Any],
    features: Mapping[str, Any],
    parent: DraftConfig | None = None,
) -> DraftConfig:
    """The config of the draft to be trained, with sizes from the op's config and the target.

    text: the language model's part of the target's config.json. info: target.json. features: features.json. parent: the
    draft of a warm start, which decides whatever no field sets. Without it whole heads are rotated, even if the
    target's are not: the reference class and speculators' converter silently misread a smaller share. Raises
    ConfigError for values that do not fit.
    """
    heads = text["num_attention_heads"]
    if config.intermediate_size is None and not text.get("intermediate_size"):
        raise DraftConfigError("intermediate_size: the target's config.json has none: set it in train_dflash")
    algorithm = algorithm_class(config.algorithm)(**({} if config.terms is None else config.terms.sizes()))
    as_target = algorithm.engine == AS_TARGET and not isinstance(algorithm, PlainLogits)
    settings = head_settings(text) if as_target else PLAIN
    shape = DraftConfig(
        hidden_size=info["hidden_size"],
        num_hidden_layers=config.num_layers,
        num_attention_heads=_first(config.num_heads, heads),
        num_key_value_heads=_first(config.num_kv_heads, text.get("num_key_value_heads"), heads),
        head_dim=_first(config.head_dim, *_head_dims(text), info["hidden_size"] // heads),
        intermediate_size=_first(config.intermediate_size, text.get("intermediate_size")),
        vocab_size=info["vocab_size"],
        block_size=config.block_size,
        mask_token_id=_mask_token_id(config, features["mask_token_id"], text, info),
        target_layer_ids=features["target_layer_ids"],
        num_target_layers=features["num_target_layers"],
        max_position_embeddings=text["max_position_embeddings"],
        rms_norm_eps=_first(*(text.get(name) for name in EPSILONS), 1e-6),
        layer_types=_layer_types(config),
        sliding_window=config.sliding_window,
        positions=features["positions"],
        input_embedding_scale=embedding_scale(text),
        output_multiplier=settings.scale,
        final_logit_softcapping=settings.soft_cap,
        algorithm=algorithm,
        **_rope(config, text),
    )
    return shape if parent is None else started_shape(config, shape, parent)


def started_shape(config: TrainDflash, shape: DraftConfig, parent: DraftConfig) -> DraftConfig:
    """The shape with what a warm start keeps of its draft. Raises DraftConfigError where the algorithm forbids it."""
    kept = OF_PARENT if config.rope_theta is not None else (*OF_PARENT, "rope_theta")
    return evolve(shape, **{name: getattr(parent, name) for name in kept})


def expected_shape(config: TrainDflash, target: Mapping[str, Any], features: FeaturesForecast | None) -> DraftConfig:
    """The draft's shape, except its mask token; of unknown layers only the number is right.

    target: its config.json. Raises ConfigError as `draft_shape`.
    """
    if config.capture == "online":
        return forecast_shape(config, target, len(config.target_layer_ids or ()) or config.capture_layers)
    if features is None:  # nothing is known of them: as many layers as a capture has by default, or fewer
        most = max(1, (target.get("text_config") or target)["num_hidden_layers"] - 3)
        return forecast_shape(config, target, min(config.capture_layers, most))
    return forecast_shape(config, target, features.num_layers, features.target_layer_ids)


def forecast_shape(
    config: TrainDflash, target: Mapping[str, Any], num_layers: int, layer_ids: tuple[int, ...] | None = None
) -> DraftConfig:
    """The draft's shape by the target's config.json and the captured layers, or only their number.

    The mask token is 0 unless the op sets it: it affects no size. Raises ConfigError as `draft_shape`.
    """
    text = target.get("text_config") or target
    layers = layer_ids or config.target_layer_ids or spread_layers(text["num_hidden_layers"], num_layers)
    info = {"hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"], "eos_token_ids": ()}
    features = {
        "mask_token_id": 0,
        "target_layer_ids": layers,
        "num_target_layers": text["num_hidden_layers"],
        "positions": POSITIONS,
    }
    defaults = {"max_position_embeddings": UNBOUNDED}  # some configs omit it, and it affects no size
    return draft_shape(config, {**defaults, **text, "pad_token_id": None}, info, features)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _head_dims(text: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The size of the target's heads; of latent attention (MLA), that of its rotated part."""
    return (text.get("qk_rope_head_dim"),) if text.get("kv_lora_rank") else (text.get("head_dim"),)


def _layer_types(config: TrainDflash) -> tuple[str, ...]:
    return tuple(
        SLIDING_ATTENTION if layer in config.sliding_layers else FULL_ATTENTION for layer in range(config.num_layers)
    )


def _mask_token_id(config: TrainDflash, of_target: int | None, text: Mapping[str, Any], info: Mapping[str, Any]) -> int:
    """The op's own mask token, else the target's as the features record it. Raises ConfigError if there is none."""
    mask_token_id = of_target if config.mask_token_id is None else config.mask_token_id
    if mask_token_id is None:
        raise ConfigError("the features have no mask token: set mask_token_id of train_dflash")
    if wrong := mask_of_texts(mask_token_id, info["eos_token_ids"], {text.get("pad_token_id")}):
        raise ConfigError(wrong)
    return mask_token_id


def _rope(config: TrainDflash, text: Mapping[str, Any]) -> dict[str, Any]:
    """The target's RoPE without its mRoPE sections, since the draft's positions are 1-D; of a target whose layers have
    different ones, that of its full layers.

    Transformers 5 keeps everything in `rope_parameters`; earlier versions in rope_theta and rope_scaling. Outside of
    Qwen's families only theta is taken: a new draft needs no stretched angles.
    """
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    parameters = parameters.get(FULL_ATTENTION) or parameters
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = None
    if kind not in ("default", "mrope") and str(text.get("model_type", SCALED)).startswith(SCALED):
        scaling = {"rope_type": kind, **{key: parameters[key] for key in parameters if key not in _ROPE_OTHERS}}
    return {
        "rope_theta": float(_first(config.rope_theta, parameters.get("rope_theta"), text.get("rope_theta"), 10000.0)),
        "rope_scaling": scaling,
    }
