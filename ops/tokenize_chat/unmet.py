"""Missing requirements of tokenising, before a run's first stage."""

from __future__ import annotations

from dsl.op import is_builtin
from ops.lib.missing_libraries import missing_torchvision
from ops.lib.target.checkpoint_check import (
    chat_template_mistakes,
    pixel_mistakes,
    processor_folder_mistakes,
    thinking_mistakes,
)
from ops.tokenize_chat.builtin_template import CHAT_TEMPLATE
from ops.tokenize_chat.op import TokenizeChat


def unmet(config: TokenizeChat) -> dict[str, str]:
    """torchvision, if it resizes images, a chat template that is none or does not read enable_thinking, what the
    directory of a processor lacks, and limits of pixels that its own exclude.
    """
    missing = {**missing_torchvision(config.image_backend), **chat_template_mistakes(config.chat_template)}
    if not is_builtin(config.processor) and (mistakes := processor_folder_mistakes(config.processor)):
        missing["processor"] = "\n".join(mistakes)
    elif not is_builtin(config.processor):
        missing |= pixel_mistakes(config.processor, config.min_pixels, config.max_pixels)
    if not missing and config.target is None:
        builtin = CHAT_TEMPLATE if is_builtin(config.processor) else ""
        missing |= thinking_mistakes(config.enable_thinking, config.chat_template, config.processor, builtin)
    return missing
