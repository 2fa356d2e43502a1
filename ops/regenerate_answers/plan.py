"""What regenerating answers needs, and what it lacks on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from dsl.errors import ConfigError, DataError
from dsl.estimate import Amount, Estimate, Growth, PlanContext
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.data.files import read_jsonl, read_object
from ops.lib.data.proxies import proxy_of
from ops.lib.forecasts import (
    Answered,
    Counts,
    SamplesForecast,
    TargetForecast,
    identity_of,
    kept_samples,
    pinned_model,
    processor_templates,
    template_digest,
)
from ops.lib.missing_libraries import missing_torchvision
from ops.lib.target.checkpoint_check import (
    chat_template_mistakes,
    pixel_mistakes,
    processor_folder_mistakes,
    template_notes,
    thinking_mistakes,
)
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.target.token_ids import GENERATION
from ops.lib.thread_table import threads_of_decoding
from ops.regenerate_answers.conflicts import check_context, sampling_mistake
from ops.regenerate_answers.op import JUDGEMENT, RegenerateAnswers, api_key

HARDLY_TRAINED = (
    "a target trained for only a few steps gives answers of the maximum length: time, tokens and features "
    "from here on are upper bounds"
)

KEPT = 'answers = "data": the answers of the data set stay, and nothing is generated'

threads = threads_of_decoding


def smoke(config: RegenerateAnswers, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: draw tokens at random, keep every answer, and judge a few as the full run gives them."""
    return {"trial": True, "max_dropped": None}


def estimate(config: RegenerateAnswers, context: PlanContext) -> Estimate:
    """Estimate memory, forecast and growth; no memory if a server answers, or the data's answers are kept."""
    target: TargetForecast | None = context.inputs["target"]
    source: SamplesForecast | None = context.inputs["samples"]
    growth = None
    generates = config.answers == "target"
    forecast = _forecast(config, context, source)
    if context.trial is not None and source is not None and source.samples is not None:
        kept = kept_samples(context.trial.artifact, source.samples)
        is_tried = target is not None and target.is_tried
        judgement = {} if is_tried or not generates else _judgement(context.trial.artifact)
        forecast = evolve(forecast, samples=kept)
        growth = Growth(
            series=(_answered(config, source.samples),) if generates else (),
            output=kept.amount().growth,
            notes=_trial_notes(config, context.trial.artifact, is_tried, judgement) if generates else (),
            fails=bool(judgement) and 0 < judgement["samples"] == sum(judgement["dropped"].values()),
        )
    if not generates:
        return Estimate(growth=growth, forecast=forecast, notes=(KEPT,))
    of_tools: tuple[str, ...] = ()
    if target is not None and source is not None and source.has_tools and target.tools_warning:
        of_tools = (f"warning: {target.tools_warning}",)
    if target is None or config.backend != "huggingface":
        notes = (*template_notes(config.chat_template, config.processor), *of_tools)
        return Estimate(growth=growth, forecast=forecast, notes=notes)
    return Estimate(
        memory={"target": target.sizes.parameters * ITEM_SIZES[config.dtype]},
        growth=growth,
        forecast=forecast,
        notes=of_tools,
    )


def _trial_notes(
    config: RegenerateAnswers, artifact: Path, is_tried: bool, judgement: Mapping[str, Any]
) -> tuple[str, ...]:
    """Notes on a target that was hardly trained, and on answers that only the trial keeps. artifact: the trial's."""
    notes = [HARDLY_TRAINED] if is_tried else []
    if dropped := judgement.get("dropped"):
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        notes.append(
            f"of {judgement['samples']} samples that were answered as the full run does it, it would drop "
            f"{sum(dropped.values())} ({reasons}): {judgement['remedies']}; the trial keeps all, so tokens and "
            "features from here on are upper bounds"
        )
    rows = [row for row in read_jsonl(artifact / "samples.jsonl") if "finish_reasons" in row]
    cut = sum("length" in row["finish_reasons"] for row in rows)
    if cut and "length" not in config.finish_reasons and not dropped:
        notes.append(
            f"{cut} of {len(rows)} answered samples have an answer that was cut at max_new_tokens = "
            f"{config.max_new_tokens}: the trial keeps them, and the full run drops them, unless max_new_tokens is "
            'raised or finish_reasons = ["stop", "length"] is set; tokens and features from here on are upper bounds'
        )
    return tuple(notes)


def _judgement(artifact: Path) -> dict[str, Any]:
    """How many of a few samples the full run would drop, as the trial wrote it; empty if it judged none."""
    file = artifact / JUDGEMENT
    return read_object(file) if file.is_file() else {}


def _forecast(config: RegenerateAnswers, context: PlanContext, source: SamplesForecast | None) -> SamplesForecast:
    answered = Answered(
        enable_thinking=config.enable_thinking,
        history_reasoning=config.history_reasoning,
        tools_as=config.tools_as,
        has_target=config.target is not None,
        target=identity_of(context.inputs["target"]),
        chat_template=template_digest(config.chat_template),
        templates=processor_templates(config.processor),
        processor=pinned_model(config.processor, config.revision),
        longest=_longest(config),
    )
    if context.artifact is not None:
        made = SamplesForecast.read(context.artifact, context.identity)
        if made.answered is not None:  # it holds how they were generated, and the node where
            own = made.answered
            answered = evolve(
                answered,
                enable_thinking=own.enable_thinking,
                history_reasoning=own.history_reasoning,
                tools_as=own.tools_as,
            )
            made = evolve(made, answered=answered)
        return made
    return SamplesForecast(
        identity=context.identity,
        empty=source.empty if source is not None else frozenset(),
        is_found=source is not None and source.is_found,
        answered=answered if config.answers == "target" else None,
        has_tools=source is not None and source.has_tools,
    )


def _longest(config: RegenerateAnswers) -> int | None:
    if config.history == "data" or "train" not in config.splits:
        return None
    return min(config.max_new_tokens, config.max_answer_tokens or config.max_new_tokens)


def _answered(config: RegenerateAnswers, samples: Counts) -> Amount:
    """The amount of answers in trial and full run; the number of batches gives the least time.

    Samples answered together take little longer than a single one.
    """
    small, full = samples.of(config.splits)
    together = config.concurrency if config.backend == "endpoint" else config.batch_tokens / config.max_new_tokens
    batches = math.ceil(small / max(together, 1))
    fewest = small * math.ceil(full / max(together, 1)) / max(batches, 1)
    return Amount(small, full, fewest=min(fewest, full))


def missing_here(config: RegenerateAnswers) -> dict[str, str]:
    """Things that are missing on this machine or in the processor's files, by field.

    They are: torchvision, if it resizes images; the server's API key; files of the processor; a chat template that
    reads enable_thinking, if set; fitting pixel limits; the checkpoint's sampling, if used; and enough context. Empty
    if the data's answers are kept.
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
    if mistakes := processor_folder_mistakes(config.processor, config.trust_remote_code):
        missing["processor"] = "\n".join(mistakes)
    elif config.processor is not None:
        missing |= pixel_mistakes(config.processor, config.min_pixels, config.max_pixels)
        try:
            check_context(config, Path(config.processor))
        except DataError as error:
            missing["max_prompt_tokens"] = str(error)
        generation = Path(config.processor) / GENERATION
        if Path(config.processor).is_dir() and (mistake := sampling_mistake(config, read_settings(generation))):
            missing["sampling"] = mistake
    if not missing and config.target is None:
        missing |= thinking_mistakes(config.enable_thinking, config.chat_template, config.processor)
    return missing
