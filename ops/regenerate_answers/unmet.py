"""Missing requirements of regenerating answers, before a run's first stage."""

from __future__ import annotations

import os

from ops.lib.missing_libraries import missing_torchvision
from ops.lib.target.checkpoint_check import processor_folder_mistakes
from ops.regenerate_answers.op import RegenerateAnswers


def unmet(config: RegenerateAnswers) -> dict[str, str]:
    """torchvision, if it resizes images, the server's API key, and what the directory of a processor lacks; nothing if
    the answers of the data stay.
    """
    if config.answers == "data":
        return {}
    missing = missing_torchvision(config.image_backend)
    if config.api_key_env is not None and not os.environ.get(config.api_key_env, "").strip():
        missing["api_key_env"] = (
            f"this environment variable is not set: export {config.api_key_env}=... with the server's API key"
        )
    if mistakes := processor_folder_mistakes(config.processor):
        missing["processor"] = "\n".join(mistakes)
    return missing
