"""Whether an export can be loaded; where it cannot be, what of the training is measured in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from dsl.errors import ConfigError, DataError
from ops.artifacts import Draft
from ops.dflash.config import DraftConfig, from_serving
from ops.diagnose.bench import EXPORTED, TRAINED, Setting
from ops.diagnose.feeding import Trained
from ops.diagnose.finding import Finding
from ops.diagnose.misfits import misfits
from ops.files import read_json

NAME = "export"
NORMAL = "the config can be read, and the file holds every tensor of its model in its shape, with finite numbers"


def loadable(
    draft: Draft, trained: Trained, weights: Mapping[str, Mapping[str, Tensor]], again: str
) -> tuple[Setting, Finding]:
    """The export as it is; where it cannot be loaded, with as little of the training's as makes it loadable.

    again: the command that writes the export again. Raises DataError where the training's do not help either.
    """
    try:
        config = from_serving(read_json(draft.path / "config.json"))
        wrong = misfits(config, weights[EXPORTED])
    except ConfigError as error:
        config, wrong = None, [str(error).replace("\n", " ")]
    if config is not None and not wrong:
        told = f"{len(weights[EXPORTED])} tensors, as its config says"
        return Setting(config), Finding(name=NAME, measured=told, normal=NORMAL)
    found = f"cannot be loaded: {'; '.join(wrong)}"
    for label, setting in _instead(config, trained, weights):
        if not misfits(setting.config, weights[setting.weights]):
            return setting, Finding(
                name=NAME,
                measured=f"{found}. The other lines are measured with {label} of the training",
                normal=NORMAL,
                advice=f"mend whatever changed the export after the training, then {again}",
                is_cause=True,
            )
    raise DataError(f"{draft.path}: the draft {found}; write it again: {again}")


def _instead(
    config: DraftConfig | None, trained: Trained, weights: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, Setting]]:
    if config is not None and TRAINED in weights:
        yield "the weights", Setting(config, weights=TRAINED)
    if trained.config is not None:
        yield "the config", Setting(trained.config)
        if TRAINED in weights:
            yield "the config and the weights", Setting(trained.config, weights=TRAINED)
