"""Reasons why a draft's directory cannot be imported for a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from dsl.errors import ConfigError, DataError
from ops.lib.data.files import read_object
from ops.lib.drafts.backbone.contract import of_import
from ops.lib.forecasts import TargetStated
from ops.lib.target.checkpoint_check import draft_folder_mistakes
from ops.load_draft.headers import dtype_mistakes, read_headers, unfit_weights
from ops.load_draft.op import LoadDraft
from ops.load_draft.read_config import read_draft_config, record_mistakes


def conflicts(config: LoadDraft, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field between the files of a draft and the sizes of the target."""
    target: TargetStated | None = forecast["target"]
    return {} if target is None else refused(config, target.info)


def refused(config: LoadDraft, target: Mapping[str, Any] | None) -> dict[str, str]:
    """Mistakes by which a directory cannot be imported, by field. target: target.json, None if unknown."""
    directory = Path(config.source)
    if not directory.exists():
        return {}
    mistakes = draft_folder_mistakes(directory)
    if not mistakes:
        try:
            written = read_object(directory / "config.json")
            mistakes = _altered(directory, written)  # first: what is read is of the right kind then
            read = None if mistakes else read_draft_config(written, target, config.partial_rotary_factor)
        except (ConfigError, DataError) as error:
            mistakes, read = [f"{directory}: {error}"], None
        if read is not None:
            files = read_headers(directory, read)
            unfit_tensors = files.mistakes or dtype_mistakes(written, files.own.values())
            mistakes = [unfit_weights(directory, unfit_tensors)] if unfit_tensors else []
    return {"source": "\n".join(mistakes)} if mistakes else {}


def _altered(directory: Path, written: Mapping[str, Any]) -> list[str]:
    """Changes made in the config.json of a dflow export, one line each."""
    found = map(of_import, record_mistakes(written))
    return [f"{directory}: {evolve(each, what=each.what.split(chr(10))[0])}" for each in found]
