"""What goes into a training, checked: that features, plan and target belong together, and the draft's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from dsl.errors import ConfigError, DataError
from dsl.stage import Stage
from ops.artifacts import TargetModel, TokenShards
from ops.capture_targets.shards import FeatureReader
from ops.dflash.config import FULL_ATTENTION, POSITIONS, SLIDING_ATTENTION, DraftConfig
from ops.load_target.ends import frozen_ends
from ops.load_target.model import target_info, text_config
from ops.tokenize_chat.shards import TokenReader
from ops.train_dflash.batches import PlannedStep, read_plan
from ops.train_dflash.online import OnlineReader, describe_features, token_mistakes
from ops.train_dflash.op import TrainDflash

_ROPE_OTHERS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


Reader = FeatureReader | OnlineReader
_Opened = tuple[dict[str, Any], Reader, Reader, list[str]]


@frozen
class Inputs:
    """embed and head are the target's, float32 [V, M]; steps are those to be trained, `max_steps` applied.

    captured: what features.json says of the features, or would say, without the shards.
    """

    draft: DraftConfig
    captured: dict[str, Any]
    train: Reader
    val: Reader
    steps: list[PlannedStep]
    pad_multiple: int
    embed_VM: Tensor
    head_VM: Tensor
    tokens: TokenShards | None

    def names(self, samples: Sequence[int]) -> list[str]:
        """Samples of the split train for a message: their ids where the node was given the tokens, else indices."""
        if self.tokens is None:
            return [str(sample) for sample in samples]
        records = TokenReader(self.tokens, "train").records
        return [f"{records[sample]['id']} ({sample})" for sample in samples]


def open_inputs(config: TrainDflash, stage: Stage) -> Inputs:
    """Open the artifacts. Raises DataError that lists all that does not fit, or ConfigError for the draft's config."""
    target, tokens = stage.inputs["target"], stage.inputs.get("tokens")
    captured, train, val, mistakes = (_online if config.capture == "online" else _stored)(config, stage)
    mistakes += _shape_mistakes(captured, target_info(target))
    if config.loss == "kl" and not captured["final_hidden"]:
        mistakes.append(
            'loss = "kl" needs the target\'s final hidden states: set final_hidden = true in capture_targets'
        )
    if not len(train):
        mistakes.append("no sample in the split train; was everything dropped by tokenize_chat?")
    if mistakes:
        listed = mistakes[0] if len(mistakes) == 1 else "\n" + "\n".join(f"  {mistake}" for mistake in mistakes)
        source = stage.inputs.get("features") or tokens
        raise DataError(f"{source.path}: {listed}")
    steps, pad_multiple = read_plan(stage.inputs["batches"], train.lengths)
    draft = draft_config(config, target, captured)
    embed_VM, head_VM = frozen_ends(target)
    return Inputs(
        draft=draft,
        captured=captured,
        train=train,
        val=val,
        steps=steps[: config.max_steps],
        pad_multiple=pad_multiple,
        embed_VM=embed_VM,
        head_VM=head_VM,
        tokens=tokens,
    )


def _stored(_config: TrainDflash, stage: Stage) -> _Opened:
    features = stage.inputs["features"]
    train, val = FeatureReader(features, "train"), FeatureReader(features, "val")
    captured = {name: value for name, value in train.info.items() if name != "shards"}
    return captured, train, val, _origin_mistakes(captured, stage.inputs["target"], stage.inputs.get("tokens"))


def _online(config: TrainDflash, stage: Stage) -> _Opened:
    tokens, target = stage.inputs["tokens"], stage.inputs["target"]
    captured = describe_features(config, tokens, target)
    train, val = OnlineReader(tokens, "train", captured), OnlineReader(tokens, "val", captured)
    return captured, train, val, token_mistakes(tokens, target)


def _origin_mistakes(info: Mapping[str, Any], target: TargetModel, tokens: TokenShards | None) -> list[str]:
    mistakes = []
    if info["target"] != target.digest:
        mistakes.append(
            f"these features were captured from the target {info['target'][:12]}, but the node's target is "
            f"{target.digest[:12]}; give capture_targets and train_dflash the same target"
        )
    if tokens is not None and info["tokens"] != tokens.digest:
        mistakes.append(
            f"these features were captured from the tokens {info['tokens'][:12]}, but the node's tokens are "
            f"{tokens.digest[:12]}; give capture_targets and train_dflash the same tokens"
        )
    return mistakes


def _shape_mistakes(info: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    """What features.json says, against target.json."""
    mistakes = [
        f"{name}: {info[name]} in the features, {expected} in the target; capture again from this target"
        for name, expected in (("hidden_size", target["hidden_size"]), ("num_target_layers", target["num_layers"]))
        if info[name] != expected
    ]
    beyond = [layer for layer in info["target_layer_ids"] if layer >= target["num_layers"] - 1]
    if beyond:
        mistakes.append(f"target_layer_ids: {beyond} are no inner layers of a target of {target['num_layers']} layers")
    if info["positions"] != POSITIONS:
        mistakes.append(f'positions: "{info["positions"]}" in the features; a draft is trained on "{POSITIONS}" ones')
    return mistakes


def draft_config(config: TrainDflash, target: TargetModel, features: Mapping[str, Any]) -> DraftConfig:
    """The draft's config: what the op leaves open is the target's. `features` is features.json."""
    text, info = text_config(target), target_info(target)
    heads = text["num_attention_heads"]
    return DraftConfig(
        hidden_size=info["hidden_size"],
        num_hidden_layers=config.num_layers,
        num_attention_heads=_first(config.num_heads, heads),
        num_key_value_heads=_first(config.num_kv_heads, text.get("num_key_value_heads"), heads),
        head_dim=_first(config.head_dim, text.get("head_dim"), info["hidden_size"] // heads),
        intermediate_size=_first(config.intermediate_size, text["intermediate_size"]),
        vocab_size=info["vocab_size"],
        block_size=config.block_size,
        mask_token_id=_mask_token_id(features["mask_token_id"], text, info),
        target_layer_ids=features["target_layer_ids"],
        num_target_layers=features["num_target_layers"],
        max_position_embeddings=text["max_position_embeddings"],
        rms_norm_eps=text["rms_norm_eps"],
        layer_types=_layer_types(config),
        sliding_window=config.sliding_window,
        positions=features["positions"],
        **_rope(config, text),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _layer_types(config: TrainDflash) -> tuple[str, ...]:
    return tuple(
        SLIDING_ATTENTION if layer in config.sliding_layers else FULL_ATTENTION for layer in range(config.num_layers)
    )


def _mask_token_id(mask_token_id: int | None, text: Mapping[str, Any], info: Mapping[str, Any]) -> int:
    if mask_token_id is None:
        raise ConfigError("the features name no mask token: give load_target a mask_token_id")
    if mask_token_id in info["eos_token_ids"] or mask_token_id == text.get("pad_token_id"):
        raise ConfigError(
            f"mask_token_id {mask_token_id} is the pad or an EOS id of the target; the mask token must be an id that "
            "no text produces"
        )
    return mask_token_id


def _rope(config: TrainDflash, text: Mapping[str, Any]) -> dict[str, Any]:
    """The target's RoPE without its mRoPE sections, since the draft's positions are 1-D.

    Transformers 5 keeps everything in `rope_parameters`; before, it was spread over rope_theta, rope_scaling and
    partial_rotary_factor. Raises ConfigError for a target whose layers have different ones.
    """
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError("the target's rope_parameters differ between its layers; such a target is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = None
    if kind not in ("default", "mrope"):
        scaling = {"rope_type": kind, **{key: parameters[key] for key in parameters if key not in _ROPE_OTHERS}}
    return {
        "rope_theta": float(_first(config.rope_theta, parameters.get("rope_theta"), text.get("rope_theta"), 10000.0)),
        "rope_scaling": scaling,
        "partial_rotary_factor": _first(
            parameters.get("partial_rotary_factor"), text.get("partial_rotary_factor"), 1.0
        ),
    }
