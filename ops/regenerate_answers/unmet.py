"""Missing requirements of regenerating answers, before a run's first stage."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import ConfigError, DataError
from ops.lib.data.proxies import proxy_of
from ops.lib.missing_libraries import missing_torchvision
from ops.lib.target.checkpoint_check import (
    chat_template_mistakes,
    pixel_mistakes,
    processor_folder_mistakes,
    thinking_mistakes,
)
from ops.regenerate_answers.api_key import api_key
from ops.regenerate_answers.context import check_context
from ops.regenerate_answers.op import RegenerateAnswers


def unmet(config: RegenerateAnswers) -> dict[str, str]:
    """torchvision, if it resizes images, the server's API key, what the directory of a processor lacks, an
    enable_thinking that its chat template does not read, limits of pixels that its own exclude, and limits beyond its
    model's context; nothing if the answers of the data stay.
    """
    if config.answers == "data":
        return {}
    missing = missing_torchvision(config.image_backend)
    try:
        api_key(config)
    except ConfigError as error:
        missing["api_key_env"] = str(error)
    proxy = None if config.endpoint is None else proxy_of(config.endpoint)
    if proxy is not None and proxy.mistake:
        missing["endpoint"] = proxy.mistake
    missing |= chat_template_mistakes(config.chat_template)
    if mistakes := processor_folder_mistakes(config.processor):
        missing["processor"] = "\n".join(mistakes)
    elif config.processor is not None:
        missing |= pixel_mistakes(config.processor, config.min_pixels, config.max_pixels)
        try:
            check_context(config, Path(config.processor))
        except DataError as error:
            missing["max_prompt_tokens"] = str(error)
    if not missing and config.target is None:
        missing |= thinking_mistakes(config.enable_thinking, config.chat_template, config.processor)
    return missing
