"""What a chat template does that answers and servers depend on: it writes the day, or thoughts in special tokens.

It is found in the template's text, which is never rendered for it; this loads no library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from datetime import date, datetime

from dsl.errors import DataError

DAY = date(2025, 1, 1)
CLOCK, DATE = "strftime_now", "date_string"
ANY_CALL = re.compile(rf"{CLOCK}\s*\(")
CALL = re.compile(rf"""{CLOCK}\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
HARMONY = "<|channel|>final<|message|>"  # of gpt-oss
THOUGHT_TAGS = (("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))  # of Magistral and Gemma 4
DATA = 'answers = "data" trains on the answers of the data set'


def is_harmony(template: str) -> bool:
    """Whether a template writes answers in the channels of gpt-oss, analysis and final."""
    return HARMONY in template


def clock_now(format: str) -> str:
    """The fixed day, in place of transformers' `strftime_now`, with which a rendering would change every day."""
    return DAY.strftime(format)


def read_day(text: str) -> date:
    """A day from its text, YYYY-MM-DD. Raises ValueError."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise ValueError(f"must be a day like 2026-01-31, and {json.dumps(text)} is none") from None


def writes_today(template: str) -> bool:
    """Whether a template asks for the day on which it is rendered."""
    return ANY_CALL.search(template) is not None


def pinned(template: str) -> str:
    """The template with DAY in the place of today's, as it is if it writes none or in a way that cannot be replaced."""
    if not writes_today(template) or writes_today(CALL.sub("", template)):
        return template
    return with_day(template, DAY, "")


def with_day(template: str, day: date, source: str) -> str:
    """The template with a fixed day in the place of today's, and as its `date_string`.

    Raises DataError for a template that writes no day, or by a format that is not in it as a plain text.
    """
    if CLOCK not in template and DATE not in template:
        raise DataError(f"the chat template of {source} writes no day: remove template_date")
    fixed = CALL.sub(lambda call: json.dumps(day.strftime(call[1] if call[2] is None else call[2])), template)
    if writes_today(fixed):
        raise DataError(
            f"the chat template of {source} calls {CLOCK} with something else than a plain text, so template_date "
            "cannot take its place: give chat_template a copy that has the day"
        )
    # trim_blocks, which transformers and engines set, removes the line break behind the block
    return f'{{%- set {DATE} = "{day:%d %b %Y}" %}}\n{fixed}' if DATE in template else fixed


def template_warnings(templates: Iterable[str], special_tokens: Collection[str] | None = None) -> tuple[str, ...]:
    """Warnings of what chat templates do that answers and servers depend on: days, and thoughts in special tokens.

    special_tokens: the tokenizer's, None where they are not known.
    """
    texts = list(templates)
    found = (day_warning(texts), thought_warning(texts, special_tokens))
    return tuple(warning for warning in found if warning)


def day_warning(templates: Iterable[str]) -> str:
    """A warning where a template writes today's day, which differs between training and serving; else empty."""
    if not any(map(writes_today, templates)):
        return ""
    return (
        f"the chat template writes today's date ({CLOCK}): all that is rendered here has {DAY}, and a server writes "
        'the day on which it answers, also with backend = "endpoint". Give chat_template a copy that has the day, here '
        "and to the server (--chat-template)"
    )


def pinned_note(template: str, source: str) -> str:
    """What is said of a template in which `pinned` puts a fixed day; empty for others.

    source: the checkpoint or the file that has it.
    """
    if template == pinned(template):
        return ""
    return (
        f"the chat template of {source} writes today's date; template_date = {DAY} is used, also by the gate and "
        "`dflow serve`; give other servers the target's chat_template.jinja (--chat-template)"
    )


def thought_warning(templates: Iterable[str], special_tokens: Collection[str] | None = None) -> str:
    """A warning where answers have parts that a text does not hold, on what remains possible; else empty.

    special_tokens: the tokenizer's, None where they are not known.
    """
    texts = list(templates)
    if any(map(is_harmony, texts)):
        return (
            "the chat template writes answers in channels (gpt-oss): the channels analysis and final are kept as "
            "reasoning and answer, calls of tools as calls, and answers with anything else are dropped. It closes only "
            'the last answer, so conversations of several turns need contexts = "served" of tokenize_chat, or '
            'train_on = "last"; answers without '
            "reasoning are learnt without the analysis that the target always writes"
        )
    known = (token for token, _ in THOUGHT_TAGS if special_tokens is None or token in special_tokens)
    token = next((token for token in known if any(token in text for text in texts)), None)
    if token is None:
        return ""
    return (
        f"the chat template has thoughts in special tokens ({token}), which the text of an answer does not hold: "
        "thoughts are kept as reasoning, and an answer that thinks is learnt by the ids that the target generated, "
        'which a server must report; of several in a conversation only with contexts = "served" of tokenize_chat. '
        f"Else ask for answers without thoughts (enable_thinking = false, where the template reads it), or {DATA}"
    )
