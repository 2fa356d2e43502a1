"""The recorded config and weights of a draft's training, beside those of the export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import Draft, DraftCheckpoint, TargetModel
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.load import read_config, read_weights
from ops.lib.drafts.backbone.serving_contract import trained_config
from ops.lib.target.model import target_info
from ops.tools.diagnose.bench import EXPORTED, TRAINED
from ops.tools.diagnose.feeding import Trained
from ops.tools.diagnose.finding import Finding, unmeasured

EXPLAINED = (
    "features",
    "own answers",
    "training against decoding",
    "anything learnt",
    "hidden states",
)  # by a wrong target


def trained_of(
    draft: Draft, training: DraftCheckpoint | None, target: TargetModel
) -> tuple[Trained, dict[str, Mapping[str, Tensor]]]:
    """What is known of the training, and the state dicts: the training's only if it differs, and for the export
    an empty one if its file cannot be read.
    """
    try:
        exported = read_weights(draft.path)
    except DataError:
        exported = {}
    weights: dict[str, Mapping[str, Tensor]] = {EXPORTED: exported}
    if training is None:
        return Trained(trained_config(_config_json(draft)), target_info(target)["mask_token_id"], None), weights
    own = read_weights(training.path)
    differing = tuple(sorted(name for name in own.keys() | exported.keys() if not _same(own, exported, name)))
    if differing:
        weights[TRAINED] = own
    config = from_serving(read_config(training.path))
    captured = read_json(training.path / "training.json")["captured"]
    config = evolve(
        config, target_layer_ids=tuple(captured["target_layer_ids"]), mask_token_id=captured["mask_token_id"]
    )
    return Trained(config, config.mask_token_id, differing), weights


def _config_json(draft: Draft) -> Mapping[str, Any]:
    """The export's config.json; empty if unreadable."""
    try:
        return read_config(draft.path)
    except DataError:
        return {}


def _same(own: Mapping[str, Tensor], exported: Mapping[str, Tensor], name: str) -> bool:
    """Whether both have the tensor, equal up to the export's dtype."""
    if name not in own or name not in exported:
        return False
    return torch.equal(own[name].to(exported[name].dtype), exported[name])


def explained(finding: Finding, by: Finding) -> Finding:
    """The finding, marked as explained by a wrong target if it is such a cause."""
    if by.is_cause and finding.is_cause and finding.name in EXPLAINED:
        return evolve(finding, explained_by=by.name)
    return finding


def target_finding(draft: Draft, training: DraftCheckpoint | None, target: TargetModel) -> Finding:
    """Whether the target, whose embedding and head the draft shares, is that of the training."""
    record: dict[str, Any] = read_json(training.path / "training.json") if training is not None else {}
    recorded = _config_json(draft).get("dflow")
    known = record.get("target") or (recorded.get("target") if isinstance(recorded, Mapping) else None)
    if not isinstance(known, str):
        return unmeasured("target", "the training's record is gone, so its target is not known")
    return Finding(
        name="target",
        measured=f"{target.digest[:12]}; the draft was trained on {known[:12]}",
        normal="the same: a draft reads the states of the target that it was trained with, and shares its two ends",
        advice="give train_dflash, export_draft and evaluate the same target",
        is_cause=known != target.digest,
    )
