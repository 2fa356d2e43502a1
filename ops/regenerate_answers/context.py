"""Whether a prompt and its answer fit the target's context. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import DataError
from ops.lib.data.files import read_object
from ops.lib.target.sizes import context_length
from ops.regenerate_answers.op import RegenerateAnswers


def check_context(config: RegenerateAnswers, checkpoint: Path) -> None:
    """Raises DataError if the longest prompt and answer that the config permits need more positions than the model of
    a checkpoint directory has; nothing is checked if its config.json is missing or names none.
    """
    if not (checkpoint / "config.json").is_file():
        return
    settings = read_object(checkpoint / "config.json")
    limit = context_length(settings.get("text_config") or settings)
    longest = config.max_prompt_tokens + config.max_new_tokens
    if limit is None or longest <= limit:
        return
    remedy = f"set max_prompt_tokens = {limit - config.max_new_tokens} or less, or lower max_new_tokens"
    if config.max_new_tokens >= limit:
        remedy = "lower max_new_tokens and max_prompt_tokens"
    raise DataError(
        f"max_prompt_tokens + max_new_tokens = {config.max_prompt_tokens} + {config.max_new_tokens} = {longest} "
        f"tokens, and the target has {limit} positions (max_position_embeddings of its config.json), beyond which "
        f"answers are poor: {remedy}"
    )
