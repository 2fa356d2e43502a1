"""Whether an export can be loaded and fits its target; if not, which part of the training replaces it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve
from torch import Tensor

from dsl.errors import ConfigError, DataError
from ops.artifacts import Draft
from ops.lib.drafts.backbone.config import (
    LAYER_IDS,
    DraftConfig,
    check_draft_fits,
    from_serving,
    unfit_fields,
    unfit_text,
)
from ops.lib.drafts.backbone.load import read_config, read_weights
from ops.tools.diagnose.bench import EXPORTED, TRAINED, Setting, misfits
from ops.tools.diagnose.feeding import CONFIG, LAYERS, NORMAL, Trained
from ops.tools.diagnose.finding import Finding

NAME = "export"
CAN_BE_LOADED = "the config is readable, and the file has every tensor of its model in its shape, with finite numbers"
ADVICE = "fix whatever changed the export after the training, then {again}"
Weights = Mapping[str, Mapping[str, Tensor]]


def loadable(
    draft: Draft, target: Mapping[str, Any], trained: Trained, weights: Weights, again: str
) -> tuple[Setting, list[Finding]]:
    """The export; if it cannot decode, with as little of the training's as makes it decode.

    target: target.json. again: the command that writes the export again. The findings are `export` and, if its
    config names what this target does not have, `layer ids` or `config`. Raises DataError if the training's do not
    help either: a draft of another target cannot decode anything.
    """
    config, wrong = _read(draft, weights)
    found = f"cannot be loaded: {'; '.join(wrong)}"
    if config is not None and not wrong:
        measured = f"{len(weights[EXPORTED])} tensors, as its config says"
        fine = Finding(name=NAME, measured=measured, normal=CAN_BE_LOADED)
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
            finding = Finding(name=NAME, measured=measured, normal=CAN_BE_LOADED, advice=advice, is_cause=True)
            return setting, [finding]
    known = trained.config or config
    if known is not None:
        check_draft_fits(known, target)
    raise DataError(f"{draft.path}: the draft {found}; write it again: {again}")


def put_first(found: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """With the others whose names are not among these."""
    return [*found, *(other for other in others if other.name not in {finding.name for finding in found})]


def _read(draft: Draft, weights: Weights) -> tuple[DraftConfig | None, list[str]]:
    """The export's config, None if unreadable, and what prevents loading the export."""
    config, wrong = None, []
    try:
        config = from_serving(read_config(draft.path))
    except (ConfigError, DataError) as error:
        wrong.append(str(error).replace("\n", " "))
    if not weights[EXPORTED]:
        try:
            read_weights(draft.path)
        except DataError as error:
            return config, [*wrong, str(error)]
    return config, wrong if config is None else misfits(config, weights[EXPORTED])


def _is_fine(setting: Setting, target: Mapping[str, Any], weights: Weights) -> bool:
    return not misfits(setting.config, weights[setting.weights]) and not unfit_fields(setting.config, target)


def _as_trained(config: DraftConfig, trained: Trained, fields: Collection[str]) -> Setting | None:
    """The config with the training's values of some fields; None if they are unknown, or contradict other fields."""
    if trained.config is None:
        return None
    try:
        return Setting(evolve(config, **{name: getattr(trained.config, name) for name in fields}))
    except ConfigError:
        return None


def _unfit_finding(right: DraftConfig, unfit: Mapping[str, str], again: str) -> Finding:
    name = LAYERS if LAYER_IDS in unfit else CONFIG
    values = ", ".join(f"{field} {json.dumps(getattr(right, field))}" for field in unfit)
    return Finding(
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
