"""The recorded config and weights of a draft's training, beside those of the export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import Draft, DraftCheckpoint, TargetModel
from ops.evaluate.verdicts import ITS_TARGET
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.contract import trained_config
from ops.lib.drafts.backbone.load import import_record, read_config, read_weights
from ops.lib.target.model import target_info
from ops.load_draft.publishers import DFLOW
from ops.tools.diagnose.answers import KEPT
from ops.tools.diagnose.answers import NAME as OWN_ANSWERS
from ops.tools.diagnose.bench import EXPORTED, TRAINED
from ops.tools.diagnose.curve import FLAT, SKIPPED
from ops.tools.diagnose.curve import NAME as LENGTH
from ops.tools.diagnose.features import NAME as FEATURES
from ops.tools.diagnose.feeding import Trained
from ops.tools.diagnose.finding import Finding, unmeasured
from ops.tools.diagnose.masks import MASK_NAMES

EXPLAINED = (
    "features",
    "own answers",
    "training against decoding",
    "anything learnt",
    "hidden states",
)  # by a wrong target
OF_TRAINING = (
    FEATURES,
    OWN_ANSWERS,
    KEPT,
    *MASK_NAMES,
    FLAT,
    LENGTH,
    SKIPPED,
    "held-out gap",
    "amount of data",
    "training against decoding",
)
UNTRAINED = ("anything learnt", "hidden states")  # causes whose remedy would be another training


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
        known = None if imported_of(draft) is not None else trained_config(_config_json(draft))
        mask = target_info(target)["mask_token_id"]
        return Trained(known, mask, None, is_imported=imported_of(draft) is not None), weights
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


def imported_of(draft: Draft) -> Mapping[str, Any] | None:
    """The record of an import; None if it is not one, or its config.json cannot be read."""
    try:
        return import_record(draft.path)
    except DataError:
        return None


def of_import(finding: Finding) -> Finding:
    """The finding of an imported draft: what only its training shows is not known, and it is not trained here."""
    if finding.name in OF_TRAINING and not finding.is_measured and not finding.needs_prompts:
        return unmeasured(finding.name, "not known: the draft was imported, and its training is not in this store")
    if finding.name in UNTRAINED and finding.is_cause:
        return evolve(finding, advice=ITS_TARGET)
    return finding


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
    imported = None if training is not None else imported_of(draft)
    if imported is not None:
        known = imported.get("trained_for", known if imported.get("publisher") == DFLOW.name else None)
        if known is None:
            return unmeasured("target", f"not known: the draft was imported, and its files do not say it; {ITS_TARGET}")
    if not isinstance(known, str):
        return unmeasured("target", "the training's record is gone, so its target is not known")
    return Finding(
        name="target",
        measured=f"{target.digest[:12]}; the draft was trained on {known[:12]}",
        normal="the same: a draft reads the states of the target that it was trained with, and shares its two ends",
        advice=ITS_TARGET if imported is not None else "give train_dflash, export_draft and evaluate the same target",
        is_cause=known != target.digest,
    )
