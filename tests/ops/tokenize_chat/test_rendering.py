"""The sandbox in which templates are rendered gives what Jinja's own gives."""

from __future__ import annotations

import pytest
from agent_rows import SAMPLES, TOOLS
from agent_templates import TEMPLATES, text_of
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from ops.lib.vision.template_kinds import CLOCK, clock_now
from ops.tokenize_chat.rendering import Sandbox

OURS, JINJAS = Sandbox(), ImmutableSandboxedEnvironment()


def a_function():
    return 1


def objects():
    """Objects that a template can reach, made anew, with attributes of every kind."""
    full = {"role": "user", "items": 1, "_own": 2, "__class__": 3, "empty": None}
    return [
        *(full, {}, Namespace(full), Namespace(role="x".format, found=False, text="{}", none=None), Namespace()),
        *("text", "a {} b", ["a"], ("a",), {1}, 3, 1.5, None, True, Undefined(name="absent")),
        *(a_function, (each for each in "ab"), dict, Namespace, "x".format, [].append, JINJAS, SAMPLES),
    ]


NAMES = [
    *("role", "items", "keys", "get", "update", "pop", "_own", "__class__", "empty", "found", "text", "none", "absent"),
    *("format", "format_map", "upper", "startswith", "append", "sort", "add", "mro", "gi_frame", "gi_code", "real"),
    *("__globals__", "__init__", "__self__", "__func__", "func_code", "__code__", "_Namespace__attrs", "call", ""),
]


def outcome(sandbox, objects_of_it, place, name):
    """What a template sees of an attribute: its value, or why it is not defined."""
    try:
        found = sandbox.getattr(objects_of_it[place], name)
    except TemplateError as error:
        return type(error), str(error)
    if isinstance(found, Undefined):
        return type(found), found._undefined_name, found._undefined_hint, found._undefined_exception
    called = found(1) if name in ("format", "startswith") and type(found).__name__ == "function" else None
    return type(found), repr(found).partition(" at 0x")[0], called


@given(places=st.lists(st.integers(0, len(objects()) - 1), min_size=1, max_size=8), names=st.permutations(NAMES))
def test_attributes_are_those_of_jinjas_sandbox_in_any_order(places, names):
    ours, theirs = objects(), objects()
    for place in places:
        for name in names:
            assert outcome(JINJAS, theirs, place, name) == outcome(OURS, ours, place, name), (place, name)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_texts_are_those_of_transformers_in_jinjas_sandbox(monkeypatch, name, sample):
    assert Sandbox is chat_template_utils.ImmutableSandboxedEnvironment
    messages = [{**message, "content": text_of(message)} for message in SAMPLES[sample]]

    def rendered(suffix):
        try:
            return render_jinja_template(
                conversations=[messages],
                tools=TOOLS,
                chat_template=TEMPLATES[name].text + suffix,  # compiled anew
                add_generation_prompt=True,
                **{CLOCK: clock_now},
            )
        except (TemplateError, TypeError) as error:
            return type(error), str(error)

    ours = rendered("{# ours #}")
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    assert rendered("{# jinja's #}") == ours
