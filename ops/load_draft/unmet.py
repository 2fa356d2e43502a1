"""Reasons why a draft's directory cannot be imported, before a run's first stage."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import ConfigError, DataError
from ops.lib.data.files import read_object
from ops.lib.target.checkpoint_check import draft_folder_mistakes
from ops.load_draft.op import LoadDraft
from ops.load_draft.read_config import read_draft_config


def unmet(config: LoadDraft) -> dict[str, str]:
    """What its files and its config.json say without the target. A model id is not looked up."""
    directory = Path(config.source)
    if not directory.exists():
        return {}
    mistakes = draft_folder_mistakes(directory)
    if not mistakes:
        try:
            read_draft_config(read_object(directory / "config.json"), None, config.partial_rotary_factor)
        except (ConfigError, DataError) as error:
            mistakes = [f"{directory}: {error}"]
    return {"source": "\n".join(mistakes)} if mistakes else {}
