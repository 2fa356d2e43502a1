"""The renderings of a sample, for ops/lib/data/limited_process.py: a chat template is code of strangers."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ops.lib.vision.template_kinds import CLOCK, clock_now

LONGEST = 64 << 20  # characters

REFUSED_BY_TEMPLATE = "refused by the chat template"
FAILED = "chat template fails on the messages"
TOO_MUCH_TEXT = "chat template writes too much text"
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def render(shared: tuple[str, dict[str, Any]], item: dict[str, Any]) -> dict[str, Any]:
    """Render texts: {"texts": [[agreement, rest, spans marked as generated], ...]}, or "reason" and "detail" of the
    first failure.

    A text begins with the first `agreement` characters of the one before it; what may fail and does is null. shared:
    the template, and the arguments of every rendering; its clock stands still. item: "messages", "tools", and
    "renderings": the places of each one's messages, its options, and whether it may fail.
    """
    template, arguments = shared[0], {CLOCK: clock_now, **shared[1]}
    results: list[Any] = []
    before = ""
    for places, options, may_fail in item["renderings"]:
        messages = [item["messages"][place] for place in places]
        try:
            texts, spans = render_jinja_template(
                conversations=[messages], tools=item["tools"], chat_template=template, **options, **arguments
            )
        except (TemplateError, *RAISED) as error:
            if may_fail:
                results.append(None)
                continue
            # The template's own refusal, e.g. of a system role; or it expects texts instead of lists of parts.
            return {"reason": REFUSED_BY_TEMPLATE if isinstance(error, TemplateError) else FAILED, "detail": str(error)}
        if len(texts[0]) > LONGEST:
            return {"reason": TOO_MUCH_TEXT, "detail": f"{len(texts[0])} characters, more than {LONGEST}"}
        shared_start = agreement(before, texts[0])
        results.append([shared_start, texts[0][shared_start:], spans[0] if spans else []])
        before = texts[0]
    return {"texts": results}


def agreement(one: str, other: str) -> int:
    """The number of characters that two texts have in common from their starts on."""
    same, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    while end - same > 1:
        middle = (same + end) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle
    return same
