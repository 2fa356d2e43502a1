"""Mistakes of a target's checkpoint, before a run's first stage."""

from __future__ import annotations

from ops.lib.target.checkpoint_check import loading_mistakes
from ops.load_target.op import LoadTarget


def unmet(config: LoadTarget) -> dict[str, str]:
    """Why the checkpoint directory cannot be a target. A model id is not looked up."""
    mistakes = loading_mistakes(config.checkpoint, config.trust_remote_code)
    return {"checkpoint": "\n".join(mistakes)} if mistakes else {}
