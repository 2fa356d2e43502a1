"""Reasons why a draft's directory cannot be imported, before a run's first stage."""

from __future__ import annotations

from ops.load_draft.op import LoadDraft
from ops.load_draft.requirements import refused


def unmet(config: LoadDraft) -> dict[str, str]:
    """What its files, its config.json and the headers of its weights say without the target. A model id is not looked
    up.

    So an altered export of dflow is found; not here, if only values of its weights or their digest were altered, and
    never, if only its target, engine or server's arguments were, which other drafts lack.
    """
    return refused(config, None)
