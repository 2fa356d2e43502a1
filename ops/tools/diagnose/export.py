"""The export beside its training: whether it can be loaded and fits its target, what differs, and its target.

Where it cannot decode, as little of the training as makes it decode takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsl.errors import ConfigError, DataError
from dsl.finding import Finding
from ops.artifacts import Draft, DraftCheckpoint, TargetModel
from ops.evaluate.verdicts import ITS_TARGET
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import (
    LAYER_IDS,
    DraftConfig,
    check_draft_fits,
    from_serving,
    unfit_fields,
    unfit_text,
)
from ops.lib.drafts.backbone.contract import trained_config
from ops.lib.drafts.backbone.load import import_record, read_config, read_weights
from ops.lib.target.model import target_info
from ops.lib.target.same_target import is_same_target
from ops.load_draft.publishers import DFLOW
from ops.tools.diagnose.bench import EXPORTED, TRAINED, Setting, misfits
from ops.tools.diagnose.feeding import NORMAL, Trained
from ops.tools.diagnose.judgement import (
    AMOUNT,
    CAUSE,
    CONFIG,
    CUT_BLOCKS,
    DECODING,
    EXPORT,
    FEATURES,
    HELD_OUT_GAP,
    HIDDEN_STATES,
    LAYERS,
    LEARNT,
    LENGTH,
    LOSS_CURVE,
    LOSS_MASK,
    MASK_IN_TEXTS,
    OWN_ANSWERS,
    SAMPLES_KEPT,
    SKIPPED_STEPS,
    TARGET,
    UNMEASURED,
    judged,
    unmeasured,
)

CAN_BE_LOADED = "the config is readable, and the file has every tensor of its model in its shape, with finite numbers"
ADVICE = "fix whatever changed the export after the training, then {again}"
OF_TRAINING = (
    *(FEATURES, OWN_ANSWERS, SAMPLES_KEPT, LOSS_MASK, CUT_BLOCKS, MASK_IN_TEXTS),
    *(LOSS_CURVE, LENGTH, SKIPPED_STEPS, HELD_OUT_GAP, AMOUNT, DECODING),
)
UNTRAINED = (LEARNT, HIDDEN_STATES)  # causes whose remedy would be another training
Weights = Mapping[str, Mapping[str, Tensor]]


def trained_of(
    draft: Draft, training: DraftCheckpoint | None, target: TargetModel
) -> tuple[Trained, dict[str, Mapping[str, Tensor]]]:
    """The facts known of the training, and the state dicts of export and training.

    The training's is included only if it differs. The export's is empty if its file cannot be read.
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
    """The import record of a draft; None if it was not imported, or its config.json cannot be read."""
    try:
        return import_record(draft.path)
    except DataError:
        return None


def of_import(finding: Finding) -> Finding:
    """The finding adapted to an imported draft, whose training is unknown and cannot be repeated here."""
    if finding.code in OF_TRAINING and finding.level == UNMEASURED and not finding.advice:
        return unmeasured(finding.code, "not known: the draft was imported, and its training is not in this store")
    if finding.code in UNTRAINED and finding.level == CAUSE:
        return evolve(finding, advice=ITS_TARGET)
    return finding


def _same(own: Mapping[str, Tensor], exported: Mapping[str, Tensor], name: str) -> bool:
    """Whether both have the tensor, with values equal up to the export's dtype."""
    if name not in own or name not in exported:
        return False
    return torch.equal(own[name].to(exported[name].dtype), exported[name])


def target_finding(draft: Draft, training: DraftCheckpoint | None, target: TargetModel) -> Finding:
    """A finding on whether the target, whose embedding and head the draft shares, is that of the training."""
    record: dict[str, Any] = read_json(training.path / "training.json") if training is not None else {}
    recorded = _config_json(draft).get("dflow")
    known = record.get("target") or (recorded.get("target") if isinstance(recorded, Mapping) else None)
    imported = None if training is not None else imported_of(draft)
    if imported is not None:
        known = imported.get("trained_for", known if imported.get("publisher") == DFLOW.name else None)
        if known is None:
            return unmeasured(TARGET, f"not known: the draft was imported, and its files do not say it; {ITS_TARGET}")
    if not isinstance(known, str):
        return unmeasured(TARGET, "the training's record is gone, so its target is not known")
    return judged(
        name=TARGET,
        measured=f"{target.digest[:12]}; the draft was trained on {known[:12]}",
        normal="the same: a draft reads the states of the target that it was trained with, and shares its two ends",
        advice=ITS_TARGET if imported is not None else "give train_dflash, export_draft and evaluate the same target",
        is_cause=not is_same_target(known, target.digest, target.path),
    )


def loadable(
    draft: Draft, target: Mapping[str, Any], trained: Trained, weights: Weights, again: str
) -> tuple[Setting, list[Finding]]:
    """The setting with which the export can be decoded, and findings.

    If the export cannot decode, as little as possible is taken from the training. target: target.json. again: the
    command that writes the export again. The findings are `export` and, if its config names what this target lacks,
    `layer ids` or `config`. Raises DataError if the training does not help either: a draft of another target cannot
    decode.
    """
    config, wrong = _read(draft, weights)
    found = f"cannot be loaded: {'; '.join(wrong)}"
    if config is not None and not wrong:
        measured = f"{len(weights[EXPORTED])} tensors, as its config says"
        fine = judged(name=EXPORT, measured=measured, normal=CAN_BE_LOADED)
        unfit = unfit_fields(config, target)
        if not unfit:
            return Setting(config), [fine]
        setting = _as_trained(config, trained, unfit)
        if setting is not None and _is_fine(setting, target, weights):
            return setting, [fine, _unfit_finding(setting.config, unfit, again)]
        found = f"does not fit the target: {unfit_text(unfit)}"
    for label, setting in _instead(config, trained, weights):
        if _is_fine(setting, target, weights):
            measured = f"{found}. The other lines are measured with {label} of the training"
            advice = ADVICE.format(again=again)
            finding = judged(name=EXPORT, measured=measured, normal=CAN_BE_LOADED, advice=advice, is_cause=True)
            return setting, [finding]
    known = trained.config or config
    if known is not None:
        check_draft_fits(known, target)
    raise DataError(f"{draft.path}: the draft {found}; write it again: {again}")


def put_first(found: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """The findings, followed by those of `others` whose code is not among them."""
    return [*found, *(other for other in others if other.code not in {finding.code for finding in found})]


def _read(draft: Draft, weights: Weights) -> tuple[DraftConfig | None, list[str]]:
    """The export's config, None if unreadable, and what prevents loading the export."""
    config, wrong = None, []
    try:
        config = from_serving(read_config(draft.path))
    except (ConfigError, DataError) as error:
        wrong.append(" ".join(str(error).split()))
    if not weights[EXPORTED]:
        try:
            read_weights(draft.path)
        except DataError as error:
            return config, [*wrong, str(error)]
    return config, wrong if config is None else misfits(config, weights[EXPORTED])


def _is_fine(setting: Setting, target: Mapping[str, Any], weights: Weights) -> bool:
    return not misfits(setting.config, weights[setting.weights]) and not unfit_fields(setting.config, target)


def _as_trained(config: DraftConfig, trained: Trained, fields: Collection[str]) -> Setting | None:
    """The setting with the training's values in some fields; None if they are unknown or contradict others."""
    if trained.config is None:
        return None
    try:
        return Setting(evolve(config, **{name: getattr(trained.config, name) for name in fields}))
    except ConfigError:
        return None


def _unfit_finding(right: DraftConfig, unfit: Mapping[str, str], again: str) -> Finding:
    name = LAYERS if LAYER_IDS in unfit else CONFIG
    values = ", ".join(f"{field} {json.dumps(getattr(right, field))}" for field in unfit)
    return judged(
        name=name,
        measured=f"{unfit_text(unfit)}. The other lines are measured as trained: {values}",
        normal=NORMAL[name],
        advice=ADVICE.format(again=again),
        is_cause=True,
    )


def _instead(config: DraftConfig | None, trained: Trained, weights: Weights) -> Iterator[tuple[str, Setting]]:
    if config is not None and TRAINED in weights:
        yield "the weights", Setting(config, weights=TRAINED)
    if trained.config is not None:
        yield "the config", Setting(trained.config)
        if TRAINED in weights:
            yield "the config and the weights", Setting(trained.config, weights=TRAINED)
