"""What answering again needs of its samples and target, as promised and as they are. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.lib.forecasts import SamplesForecast, TargetStated, pixels_misfit
from ops.regenerate_answers.context import context_mistake
from ops.regenerate_answers.op import RegenerateAnswers


def conflicts(config: RegenerateAnswers, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Splits without a sample, limits beyond the target's context, and those of pixels that its own exclude; nothing if
    the answers of the data stay.
    """
    samples: SamplesForecast | None = forecast["samples"]
    target: TargetStated | None = forecast["target"]
    wrong: dict[str, str] = {}
    if config.answers == "data":
        return wrong
    if samples is not None and samples.empty.issuperset(config.splits):
        wrong["splits"] = f"no samples in the splits {', '.join(config.splits)}: nothing to answer"
    if target is not None and (mistake := context_mistake(config, target.text)):
        wrong["max_prompt_tokens"] = mistake
    return wrong | pixels_misfit(target, config.min_pixels, config.max_pixels)
