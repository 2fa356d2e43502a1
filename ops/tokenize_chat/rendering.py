"""The renderings of a sample, for ops/lib/data/limited_process.py: a chat template is code of strangers.

transformers renders in Jinja's sandbox. That asks at every access to an attribute whether it is safe, which takes more
time than all else in a template, so the sandbox is replaced by `Sandbox`, which asks once for each type, and ends a
loop that can do no more (`_end_early`).
"""

from __future__ import annotations

from types import BuiltinMethodType, NoneType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils
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

OF_DICTS = frozenset(dir(dict))
READING = frozenset(("get", "items", "keys", "values"))  # methods of dicts
PLAIN = frozenset((str, bool, int, float, list, dict, NoneType))  # types of values that are no methods


class Compiler(CodeGenerator):
    """Jinja's compiler, with an end to loops that can do no more."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        _end_early(node)
        super().visit_For(node, frame)


def _end_early(loop: nodes.For) -> None:
    """End a loop over a range at the first step that does nothing because of an attribute, as in

        {% for k in range(n) %}{% if not ns.found %}...{% endif %}{% endfor %}
        {% for k in range(n) %}{% if ns.stopped %}{% elif ... %}...{% endif %}{% endfor %}

    Nothing changes in such a step, so all that follow do nothing either. Gemma 4 has such loops over the messages, for
    each message.
    """
    branch = loop.body[0] if len(loop.body) == 1 else None
    over = loop.iter.node if isinstance(loop.iter, nodes.Call) else None
    is_range = isinstance(over, nodes.Name) and over.name == "range"
    is_plain = not (loop.test or loop.else_ or loop.recursive)
    if not (isinstance(branch, nodes.If) and is_range and is_plain):
        return
    is_negated = isinstance(branch.test, nodes.Not)
    state = branch.test.node if isinstance(branch.test, nodes.Not) else branch.test
    own = {"loop", *(name.name for name in loop.find_all(nodes.Name) if name.ctx == "store")}
    if not (isinstance(state, nodes.Getattr) and isinstance(state.node, nodes.Name) and state.node.name not in own):
        return
    if is_negated and not branch.elif_ and not branch.else_:
        branch.else_ = [nodes.Break(lineno=branch.lineno)]
    elif not is_negated and not branch.body:
        branch.body = [nodes.Break(lineno=branch.lineno)]


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with its answers kept: whether an attribute is safe depends on type and name only."""

    code_generator_class = Compiler

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = (type(obj), attr)
        is_safe = self._is_safe.get(key)
        if is_safe is None:
            is_safe = self._is_safe[key] = super().is_safe_attribute(obj, attr, value)
        return is_safe

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The attribute of an object, or else its item: of most dicts, such as a message, and namespaces right away."""
        kind = type(obj)
        if kind is dict and attribute in READING:
            return getattr(obj, attribute)
        if kind is dict and attribute not in OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is Namespace and not attribute.startswith("_"):
            value = object.__getattribute__(obj, "_Namespace__attrs").get(attribute, self)
            if type(value) in PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, called: Any, /, *args: Any, **named: Any) -> Any:
        """The result of a call: right away of methods of plain values, and of what gets nothing from the context."""
        is_method = type(called) is BuiltinMethodType and type(called.__self__) in PLAIN
        if not (is_method or called is Namespace or called is safe_range):
            return super().call(context, called, *args, **named)
        named.pop("_loop_vars", None)
        named.pop("_block_vars", None)
        return called(*args, **named)


chat_template_utils.ImmutableSandboxedEnvironment = Sandbox


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
