"""Checked inputs of a training: that features, plan and target belong together, and the draft's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsl.stage import Stage
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import DraftConfig, from_serving
from ops.lib.drafts.backbone.load import CONFIG, read_config
from ops.lib.forecasts import (
    DraftForecast,
    FeaturesForecast,
    StepsForecast,
    TargetStated,
    TokensForecast,
    refuse_conflicts,
)
from ops.lib.target.embedding_and_head import Head, frozen_ends
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import check_samples_fit, length_warnings, target_info, text_config
from ops.lib.target.token_ids import mask_warning
from ops.lib.training import rank_group
from ops.train_dflash.batches import PlannedStep, read_plan
from ops.train_dflash.conflicts import conflicts
from ops.train_dflash.online import OnlineReader, describe_features
from ops.train_dflash.op import ONLINE_SPLITS, TrainDflash
from ops.train_dflash.shape import draft_shape

Reader = FeatureReader | OnlineReader
_Opened = tuple[dict[str, Any], Reader, Reader]


@frozen
class Inputs:
    """The checked inputs of a training.

    embed, head: the target's, [V, M], on the rank's device in the config's dtype. steps: those to train, at most
    `max_steps`. captured: the content of features.json without its shards, even if captured online, with the training's
    mask token.
    """

    draft: DraftConfig
    captured: dict[str, Any]
    train: Reader
    val: Reader
    steps: list[PlannedStep]
    pad_multiple: int
    embed_VM: Tensor
    head: Head
    tokens: TokenShards | None

    def names(self, samples: Sequence[int]) -> list[str]:
        """The names of train samples for a message: their ids if the node has tokens, else indices."""
        if self.tokens is None:
            return [str(sample) for sample in samples]
        records = TokenReader(self.tokens, "train").records
        return [f"{records[sample]['id']} ({sample})" for sample in samples]


def open_inputs(config: TrainDflash, stage: Stage) -> Inputs:
    """Open the artifacts. Raises DataError with all mismatches, or ConfigError for the draft's config."""
    target, tokens = stage.inputs["target"], stage.inputs.get("tokens")
    source = stage.inputs.get("features") or tokens
    captured, train, val = (_online if config.capture == "online" else _stored)(config, stage)
    refuse_conflicts(conflicts(config, _statements(stage)), source)
    if config.capture == "online" and tokens is not None:
        readers = [TokenReader(tokens, split) for split in ONLINE_SPLITS]
        check_samples_fit(readers, target)
        for beyond in length_warnings(readers, target) if stage.rank == 0 else ():
            stage.warn(beyond)
    steps, pad_multiple = read_plan(stage.inputs["batches"], train.lengths)
    draft = draft_config(config, target, captured, _parent(stage))
    if config.mask_token_id is not None and (warning := mask_warning(target.path / "model", draft.mask_token_id)):
        stage.warn(warning)  # load_target warns of its own
    embed_VM, head = frozen_ends(target, rank_group.device_of(stage), getattr(torch, config.dtype))
    return Inputs(
        draft=draft,
        captured=captured | {"mask_token_id": draft.mask_token_id},
        train=train,
        val=val,
        steps=steps[: config.max_steps],
        pad_multiple=pad_multiple,
        embed_VM=embed_VM,
        head=head,
        tokens=tokens,
    )


def _statements(stage: Stage) -> dict[str, Any]:
    """The forecasts that describe the stage's real inputs, by edge."""
    target, features, tokens = stage.inputs["target"], stage.inputs.get("features"), stage.inputs.get("tokens")
    parent = stage.inputs.get("warm_start")
    if parent is not None and not (parent.path / CONFIG).is_file():  # `load_weights` reports it
        parent = None
    return {
        "warm_start": None if parent is None else DraftForecast.read(parent.path, parent.digest),
        "target": TargetStated.read(target.path, target.digest),
        "features": None if features is None else FeaturesForecast.read(features.path, features.digest),
        "tokens": None if tokens is None else TokensForecast.read(tokens.path, tokens.digest),
        "batches": StepsForecast.read(stage.inputs["batches"].path),
    }


def _stored(_config: TrainDflash, stage: Stage) -> _Opened:
    features = stage.inputs["features"]
    train, val = FeatureReader(features, "train"), FeatureReader(features, "val")
    captured = {name: value for name, value in train.info.items() if name != "shards"}
    return captured, train, val


def _online(config: TrainDflash, stage: Stage) -> _Opened:
    tokens, target = stage.inputs["tokens"], stage.inputs["target"]
    captured = describe_features(config, tokens, target)
    train, val = OnlineReader(tokens, "train", captured), OnlineReader(tokens, "val", captured)
    return captured, train, val


def draft_config(
    config: TrainDflash, target: TargetModel, features: Mapping[str, Any], parent: DraftConfig | None = None
) -> DraftConfig:
    """The draft's config. Fields that the op does not set are the target's, or those of a warm start's parent.

    features: content of features.json.
    """
    return draft_shape(config, text_config(target), target_info(target), features, parent)


def _parent(stage: Stage) -> DraftConfig | None:
    """The config of a warm start's draft, None without one. Missing files are reported by `load_weights`."""
    warm_start = stage.inputs.get("warm_start")
    if warm_start is None or not (warm_start.path / CONFIG).is_file():
        return None
    return from_serving(read_config(warm_start.path))
