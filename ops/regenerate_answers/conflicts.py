"""What answering again needs of its samples and target, as promised and as they are. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from ops.lib.data.files import read_object
from ops.lib.forecasts import SamplesForecast, TargetStated, pixels_misfit
from ops.lib.target.sizes import context_length, positions_field
from ops.lib.vision.family_config import text_part
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.sampling import Sampling

A_SERVER = 'let a server answer, with backend = "endpoint"'


def conflicts(config: RegenerateAnswers, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: splits without samples, images in prompts by ids, a checkpoint that recommends no sampling,
    limits beyond the target's context, excluded pixel limits, quantised weights that transformers does not run.

    Empty if the data's answers are kept.
    """
    samples: SamplesForecast | None = forecast["samples"]
    target: TargetStated | None = forecast["target"]
    wrong: dict[str, str] = {}
    if config.answers == "data":
        return wrong
    if samples is not None and samples.empty.issuperset(config.splits):
        wrong["splits"] = f"no samples in the splits {', '.join(config.splits)}: nothing to answer"
    if samples is not None and samples.has_images and config.prompts == "ids":
        wrong["prompts"] = (
            'prompts = "ids" are prompts of texts only, and the samples have images: set prompts = "messages", or '
            "remove the samples with images"
        )
    if (
        target is not None
        and target.generation is not None
        and (mistake := sampling_mistake(config, target.generation))
    ):
        wrong["sampling"] = mistake
    if target is not None and (mistake := context_mistake(config, target.text)):
        wrong["max_prompt_tokens"] = mistake
    if target is not None and config.backend == "huggingface" and (mistake := target.running_mistake(A_SERVER)):
        wrong["target"] = mistake
    return wrong | pixels_misfit(target, config.min_pixels, config.max_pixels)


def sampling_mistake(config: RegenerateAnswers, generation: Mapping[str, Any]) -> str:
    """A text on why a checkpoint's sampling cannot be used; empty if it can, or need not. generation: its settings."""
    try:
        Sampling.of(config, generation)
    except DataError as error:
        return str(error)
    return ""


def check_context(config: RegenerateAnswers, checkpoint: Path) -> None:
    """Check that the longest allowed prompt and answer fit the positions of a checkpoint's model. Raises DataError.

    Nothing is checked if its config.json is missing or names no number of positions.
    """
    if not (checkpoint / "config.json").is_file():
        return
    settings = read_object(checkpoint / "config.json")
    if mistake := context_mistake(config, text_part(settings)):
        raise DataError(mistake)


def context_mistake(config: RegenerateAnswers, text: Mapping[str, Any]) -> str:
    """A text on why prompt and answer exceed a model's positions; empty if they fit. text: its config's text part."""
    limit = context_length(text)
    longest = config.max_prompt_tokens + config.max_new_tokens
    if limit is None or longest <= limit:
        return ""
    remedy = f"set max_prompt_tokens = {limit - config.max_new_tokens} or less, or lower max_new_tokens"
    if config.max_new_tokens >= limit:
        remedy = "lower max_new_tokens and max_prompt_tokens"
    return (
        f"max_prompt_tokens + max_new_tokens = {config.max_prompt_tokens} + {config.max_new_tokens} = {longest} "
        f"tokens, and the target has {limit} positions ({positions_field(text)} of its config.json), beyond which "
        f"answers are poor: {remedy}"
    )
