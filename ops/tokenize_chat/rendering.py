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


def render(shared: tuple[str, dict[str, Any]], item: list[Any]) -> dict[str, Any]:
    """Render texts: {"texts": [[text, spans marked as generated], ...]}, or "reason" and "detail" of the first failure.

    shared: the template, and the arguments of every rendering; its clock stands still. item: messages and options of
    each rendering.
    """
    template, arguments = shared[0], {CLOCK: clock_now, **shared[1]}
    results: list[Any] = []
    for messages, options in item:
        try:
            texts, spans = render_jinja_template(
                conversations=[messages], chat_template=template, **options, **arguments
            )
        except TemplateError as error:  # e.g. a template without a system role, or one that requires alternating roles
            return {"reason": REFUSED_BY_TEMPLATE, "detail": str(error)}
        except RAISED as error:  # e.g. a template that expects texts instead of lists of parts
            return {"reason": FAILED, "detail": str(error)}
        if len(texts[0]) > LONGEST:
            return {"reason": TOO_MUCH_TEXT, "detail": f"{len(texts[0])} characters, more than {LONGEST}"}
        results.append([texts[0], spans[0] if spans else []])
    return {"texts": results}
