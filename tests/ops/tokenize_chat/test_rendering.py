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


def rendered_by(sandbox, text):
    """The text of a template, or the error that it ends with."""
    told = {"d": {"a": 1, "n": None}, "texts": ["x", "y"], "empty": ""}
    try:
        return sandbox.from_string(text).render(told)
    except (TemplateError, TypeError, OverflowError, IndexError) as error:
        return type(error), str(error)


CALLS = [
    *("{{ d.get('a') }}{{ d.get('b', 2) }}{{ d.items() | list }}{{ d.keys() | list }}{{ d.values() | list }}",),
    *("{{ d.get() }}", "{{ d.get([]) }}", "{{ d.pop('a') }}", "{{ d.get.upper }}", "{{ texts.append(1) }}{{ texts }}"),
    *(
        "{{ texts.index('y') }}{{ 'a b'.split() }}{{ 'a'.join(texts) }}",
        "{{ texts.index('z') if empty }}{{ d.none() }}",
    ),
    *("{{ '{} {}'.format(1, d) }}", "{{ '{a}'.format_map(d) }}", "{{ 'ab'.startswith('a') }}{{ 'ab'.startswith(1) }}"),
    *("{% for t in texts %}{{ t.upper() }}{{ range(3) | list }}{{ namespace(a=t).a }}{% endfor %}",),
    *("{{ range(100001) }}", "{{ range(2, 9, 3) | list }}", "{{ range('a') }}", "{{ namespace(d, a=3).a }}"),
]


@pytest.mark.parametrize("text", CALLS)
def test_calls_give_what_they_give_in_jinjas_sandbox(text):
    assert rendered_by(JINJAS, text) == rendered_by(OURS, text)


STATES = ("ns.found", "not ns.found", "ns.count", "not ns.absent", "loop.first", "not loop.first", "k.found", "d.a")
ACTIONS = (
    "",
    "{% set ns.found = true %}",
    "{% set ns.found = false %}",
    "{% set ns.count = ns.count + k %}",
    "[{{ k }}]",
)
OVER = ("range(4)", "range(3, -1, -1)", "texts", "range(4) if k != 1", "range(0)")


@given(
    over=st.sampled_from(OVER),
    test=st.sampled_from(STATES),
    then=st.lists(st.sampled_from(ACTIONS), max_size=2),
    other=st.none() | st.sampled_from(("k == 1", "ns.count > 1", "not ns.found")),
    otherwise=st.none() | st.sampled_from(ACTIONS),
    around=st.sampled_from(("", ".")),
    empty=st.sampled_from(("", "{% else %}none")),
)
def test_loops_that_may_end_early_write_what_they_write_in_jinjas_sandbox(
    over, test, then, other, otherwise, around, empty
):
    branches = f"{{% if {test} %}}{''.join(then)}"
    branches += "" if other is None else f"{{% elif {other} %}}{{% set ns.found = not ns.found %}}{{{{ k }}}}"
    branches += "" if otherwise is None else f"{{% else %}}{otherwise}"
    loop = f"{{% for k in {over} %}}{around}{branches}{{% endif %}}{empty}{{% endfor %}}"
    for found in ("true", "false"):
        text = f"{{% set ns = namespace(found={found}, count=0) %}}{loop}{{{{ ns.found }}}}{{{{ ns.count }}}}"
        assert rendered_by(JINJAS, text) == rendered_by(OURS, text)


@pytest.mark.parametrize(
    "body",
    [
        "{% if not seen.stopped %}{% endif %}",
        "{% if seen.stopped %}{% elif k == 1 %}{{ k }}{% endif %}",
    ],
)
def test_a_loop_that_can_do_no_more_ends(body):
    class Seen:
        """A state that counts how often it is looked at."""

        looks = 0

        @property
        def stopped(self):
            self.looks += 1
            return True

    for sandbox, looks in ((OURS, 1), (JINJAS, 1000)):
        seen = Seen()
        assert sandbox.from_string(f"{{% for k in range(1000) %}}{body}{{% endfor %}}").render(seen=seen) == ""
        assert seen.looks == looks
