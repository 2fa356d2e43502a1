"""Checked inputs of a training: that features, plan and target belong together, and the draft's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsl.errors import DataError
from dsl.stage import Stage
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import POSITIONS, DraftConfig, from_serving
from ops.lib.drafts.backbone.load import CONFIG, read_config
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.target.ends import frozen_ends
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import target_info, text_config
from ops.lib.target.token_ids import mask_warning
from ops.lib.training import ranks
from ops.train_dflash.batches import PlannedStep, read_plan
from ops.train_dflash.online import OnlineReader, describe_features, token_mistakes
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.shape import draft_shape

Reader = FeatureReader | OnlineReader
_Opened = tuple[dict[str, Any], Reader, Reader, list[str]]


@frozen
class Inputs:
    """embed and head are the target's, [V, M], on the rank's device in the config's dtype. steps are those to train,
    `max_steps` applied.

    captured: the content of features.json without the shards, also if the features are captured online, with the mask
    token of the training.
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
        """Names of samples of the split train for a message: their ids if the node has tokens, else indices."""
        if self.tokens is None:
            return [str(sample) for sample in samples]
        records = TokenReader(self.tokens, "train").records
        return [f"{records[sample]['id']} ({sample})" for sample in samples]


def open_inputs(config: TrainDflash, stage: Stage) -> Inputs:
    """Open the artifacts. Raises DataError with all mismatches, or ConfigError for the draft's config."""
    target, tokens = stage.inputs["target"], stage.inputs.get("tokens")
    captured, train, val, mistakes = (_online if config.capture == "online" else _stored)(config, stage)
    mistakes += _shape_mistakes(captured, target_info(target))
    if config.needs_teacher and not captured["final_hidden"]:
        mistakes.append(
            f"{_of_teacher(config)} needs the target's final hidden states: set final_hidden = true in capture_targets"
        )
    if not len(train):
        mistakes.append("no sample in the split train; was everything dropped by tokenize_chat?")
    if mistakes:
        listed = mistakes[0] if len(mistakes) == 1 else "\n" + "\n".join(f"  {mistake}" for mistake in mistakes)
        source = stage.inputs.get("features") or tokens
        assert source is not None  # the op requires one of them
        raise DataError(f"{source.path}: {listed}")
    steps, pad_multiple = read_plan(stage.inputs["batches"], train.lengths)
    draft = draft_config(config, target, captured, _parent(stage))
    if config.mask_token_id is not None and (warning := mask_warning(target.path / "model", draft.mask_token_id)):
        stage.warn(warning)  # load_target warns of its own
    embed_VM, head_VM = frozen_ends(target, ranks.device_of(stage), getattr(torch, config.dtype))
    return Inputs(
        draft=draft,
        captured=captured | {"mask_token_id": draft.mask_token_id},
        train=train,
        val=val,
        steps=steps[: config.max_steps],
        pad_multiple=pad_multiple,
        embed_VM=embed_VM,
        head_VM=head_VM,
        tokens=tokens,
    )


def _of_teacher(config: TrainDflash) -> str:
    """What of the loss reads the target's distribution."""
    is_kind = needs_teacher(config.loss)
    return f'loss = "{config.loss}"' if is_kind else f'the loss of algorithm = "{config.algorithm}"'


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
    """Contradictions between features.json and target.json."""
    mistakes = [
        f"{name}: {info[name]} in the features, {expected} in the target; capture again from this target"
        for name, expected in (("hidden_size", target["hidden_size"]), ("num_target_layers", target["num_layers"]))
        if info[name] != expected
    ]
    beyond = [layer for layer in info["target_layer_ids"] if layer >= target["num_layers"] - 1]
    if beyond:
        mistakes.append(f"target_layer_ids: {beyond} are no inner layers of a target of {target['num_layers']} layers")
    if info["positions"] != POSITIONS:
        mistakes.append(f'positions: "{info["positions"]}" in the features, must be "{POSITIONS}"; capture again')
    return mistakes


def draft_config(
    config: TrainDflash, target: TargetModel, features: Mapping[str, Any], parent: DraftConfig | None = None
) -> DraftConfig:
    """The draft's config: fields without a value in the op are the target's, or the parent's of a warm start.

    `features` is features.json.
    """
    return draft_shape(config, text_config(target), target_info(target), features, parent)


def _parent(stage: Stage) -> DraftConfig | None:
    """The config of a warm start's draft. If its files are missing, `load_weights` reports it."""
    warm_start = stage.inputs.get("warm_start")
    if warm_start is None or not (warm_start.path / CONFIG).is_file():
        return None
    return from_serving(read_config(warm_start.path))
