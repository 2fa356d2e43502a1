"""What tokenising needs of its samples and target, as promised and as they are. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dsl.op import is_builtin
from ops.lib.forecasts import (
    Answered,
    SamplesForecast,
    TargetStated,
    are_different,
    by_field,
    identity_of,
    pinned_model,
    pixels_misfit,
    processor_templates,
    template_digest,
)
from ops.tokenize_chat.op import TokenizeChat

SERVED = 'set contexts = "served"'
SAME = "give regenerate_answers and tokenize_chat the same"


def conflicts(config: TokenizeChat, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: an empty train split, other prompts than the target answered, answers that are all too short,
    excluded pixel limits.
    """
    samples: SamplesForecast | None = forecast["samples"]
    found = pixels_misfit(forecast.get("target"), config.min_pixels, config.max_pixels)
    if samples is None:
        return found
    if samples.answered is not None:
        found |= by_field(_of_answers(config, samples.answered, forecast.get("target")))
    if "train" in samples.empty and not config.prompts_only:
        found["samples"] = (
            "no sample is in the train split: check split of ingest, or set prompts_only = true for prompts of evaluate"
        )
    return found


def tools_warning(config: TokenizeChat) -> str:
    """A text on answers of samples with tools that are not learnt as they are served; empty if they are."""
    if config.contexts == "served" or config.prompts_only:
        return ""
    return f"answers are learnt behind a history that no server renders: {SERVED}"


def _of_answers(config: TokenizeChat, answered: Answered, target: TargetStated | None) -> Iterator[tuple[str, str]]:
    if config.enable_thinking != answered.enable_thinking:
        asked, here = json.dumps(answered.enable_thinking), json.dumps(config.enable_thinking)
        remedy = f"{SAME} enable_thinking, or answers and prompts do not fit each other"
        yield "enable_thinking", f"the answers were generated with {asked}, and this node has {here}: {remedy}"
    if config.history_reasoning != answered.history_reasoning:
        asked, here = json.dumps(answered.history_reasoning), json.dumps(config.history_reasoning)
        remedy = f'{SAME} one ("dropped" with contexts = "served"), or answers are learnt behind other prompts'
        about = f"the answers were generated with history_reasoning = {asked}, and this node has {here}"
        yield "history_reasoning", f"{about}: {remedy}"
    if config.tools_as != answered.tools_as:
        remedy = f"{SAME} tools_as, or answers and prompts do not fit each other"
        asked = f'tools as "{answered.tools_as}", and this node has "{config.tools_as}"'
        yield "tools_as", f"the answers were generated with {asked}: {remedy}"
    learns_one = config.train_on == "last" and not config.prompts_only  # else those of a conversation count together
    if learns_one and answered.longest is not None and answered.longest < config.min_loss_tokens:
        yield (
            "min_loss_tokens",
            f"only the last answer is learnt, and has at most {answered.longest} tokens (max_new_tokens or "
            f"max_answer_tokens of regenerate_answers), and samples with fewer than {config.min_loss_tokens} are "
            'dropped: lower min_loss_tokens, raise the other, or set train_on = "assistant"',
        )
    if are_different(answered.target, identity_of(target)):
        yield "target", f"the answers are those of another target: {SAME} target"
    if config.target is not None or answered.has_target is None:
        return
    if is_builtin(config.processor):
        own, remedy = ("target", "give the target instead") if answered.has_target else ("server", f"{SAME} processor")
        yield "processor", f"the answers are those of a {own}, whose tokenizer this is not: {remedy}"
    elif not answered.has_target:
        yield from _of_templates(config, answered)


def _of_templates(config: TokenizeChat, answered: Answered) -> Iterator[tuple[str, str]]:
    if answered.chat_template != template_digest(config.chat_template):
        yield "chat_template", f"the answers were generated with another one: {SAME} chat_template"
    elif config.chat_template is None:
        own, here = pinned_model(config.processor, config.revision), processor_templates(config.processor)
        if own is not None and answered.processor not in (None, own):
            yield "processor", f"the answers were asked for by that of {answered.processor}, not of {own}: {SAME} one"
        if here is not None and answered.templates is not None and here.isdisjoint(answered.templates):
            yield "processor", f"the answers were generated with another chat template: {SAME} processor"
