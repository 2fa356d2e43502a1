"""Missing requirements of tokenising, before a run's first stage."""

from __future__ import annotations

from dsl.op import is_builtin
from ops.lib.missing_libraries import missing_torchvision
from ops.lib.target.checkpoint_check import chat_template_mistakes, processor_folder_mistakes
from ops.tokenize_chat.op import TokenizeChat


def unmet(config: TokenizeChat) -> dict[str, str]:
    """torchvision, if it resizes images, a chat template that is none, and what the directory of a processor lacks."""
    missing = {**missing_torchvision(config.image_backend), **chat_template_mistakes(config.chat_template)}
    if not is_builtin(config.processor) and (mistakes := processor_folder_mistakes(config.processor)):
        missing["processor"] = "\n".join(mistakes)
    return missing
