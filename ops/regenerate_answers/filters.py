"""Filters of answered samples, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ops.regenerate_answers.conversations import SPECIAL_IN_ANSWER, turns_of, with_answers
from ops.regenerate_answers.op import RegenerateAnswers

FINISHED = "finish reason {}"
TOO_SHORT, TOO_LONG = "fewer than min_answer_tokens", "more than max_answer_tokens"
RETOKENISED = "tokenised otherwise than generated"
UNTRAINED = "a target that writes tokens of the chat template is likely not trained, or has another chat template"
# What lets answers through that were dropped for a reason.
REMEDIES = {
    FINISHED.format(
        "length"
    ): 'raise max_new_tokens, or keep answers that were cut: finish_reasons = ["stop", "length"]',
    TOO_SHORT: "lower min_answer_tokens",
    TOO_LONG: "raise max_answer_tokens",
    RETOKENISED: "set drop_retokenised = false",
    SPECIAL_IN_ANSWER: UNTRAINED,
}


def refusal(config: RegenerateAnswers, outcome: Mapping[str, Any]) -> tuple[str, str] | None:
    """(reason, detail) for which a sample is dropped, that of its first answer at fault; None where it is kept.

    outcome: a line of a shard in the work folder, see `Conversation.outcome`.
    """
    for answer in outcome["answers"]:
        tokens = answer["tokens"]
        if answer["finish_reason"] not in config.finish_reasons:
            return FINISHED.format(answer["finish_reason"]), ""
        if tokens < config.min_answer_tokens:
            return TOO_SHORT, f"{tokens} tokens"
        if config.max_answer_tokens is not None and tokens > config.max_answer_tokens:
            return TOO_LONG, f"{tokens} tokens"
        if config.drop_retokenised and answer["retokenised_differently"]:
            return RETOKENISED, ""
    return (outcome["reason"], outcome["detail"]) if outcome["reason"] else None


def regenerated_row(row: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with its new answers, and how each of them ended."""
    answers = outcome["answers"]
    return {
        **row,
        "messages": with_answers(turns_of(row), [answer["text"] for answer in answers]),
        "finish_reasons": [answer["finish_reason"] for answer in answers],
        "answer_tokens": [answer["tokens"] for answer in answers],
    }


def remedies(reasons: Iterable[str]) -> str:
    """What would keep samples that were dropped for these reasons."""
    known = [REMEDIES[reason] for reason in reasons if reason in REMEDIES]
    return "; ".join([*known, "a target that was not trained ends no answer"])
