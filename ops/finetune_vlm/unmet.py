"""Mistakes of the checkpoint to start from, before a run's first stage."""

from __future__ import annotations

from dsl.errors import DataError
from dsl.op import is_builtin
from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.target.checkpoint_check import loading_mistakes
from ops.lib.target.tiny_config import check_builtin


def unmet(config: FinetuneVlm) -> dict[str, str]:
    """Why the checkpoint directory cannot be trained. A model id is not looked up."""
    if is_builtin(config.init):
        try:
            check_builtin(config.init)
        except DataError as error:
            return {"init": str(error)}
        return {}
    mistakes = loading_mistakes(config.init, config.trust_remote_code)
    return {"init": "\n".join(mistakes)} if mistakes else {}
