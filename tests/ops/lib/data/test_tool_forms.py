"""Tools in the forms of engines, with which tests/sglang and tests/vllm compare them, and in what these differ."""

from __future__ import annotations

import json

from agent_rows import OTHER_KEYS, OTHER_ORDER, PARAMETERS, SHORT, TOOLS

from ops.lib.data.tool_forms import FORMS, GIVEN, ToolsUnlike, tools_in_form
from ops.lib.sglang.version import VERSIONS
from ops.lib.vllm.version import VLLM_VERSION

OF_ENGINES = {
    "sglang-0.5.21": [
        {
            "type": "function",
            "function": {"description": "Tells a day.", "name": "then", "parameters": PARAMETERS, "strict": True},
            "defer_loading": None,
        },
        {
            "type": "function",
            "function": {"description": None, "name": "now", "parameters": PARAMETERS, "strict": False},
            "defer_loading": None,
        },
        {
            "type": "function",
            "function": {
                "description": None,
                "name": "later",
                "parameters": None,
                "strict": False,
                "defer_loading": True,
            },
            "defer_loading": True,
        },
    ],
    "sglang-0.5.23": [
        {
            "type": "function",
            "function": {"strict": True, "parameters": PARAMETERS, "name": "then", "description": "Tells a day."},
            "defer_loading": None,
        },
        {
            "type": "function",
            "function": {"name": "now", "parameters": PARAMETERS, "description": None},
            "defer_loading": None,
        },
        {
            "type": "function",
            "function": {
                "name": "later",
                "description": None,
                "strict": False,
                "parameters": None,
                "defer_loading": True,
            },
            "defer_loading": True,
        },
    ],
    "vllm-0.33.0": [
        {
            "type": "function",
            "function": {"name": "then", "description": "Tells a day.", "parameters": PARAMETERS, "strict": True},
        },
        {"type": "function", "function": {"name": "now", "description": None, "parameters": PARAMETERS}},
        {
            "type": "function",
            "function": {
                "name": "later",
                "description": None,
                "parameters": None,
                "strict": False,
                "defer_loading": True,
            },
            "defer_loading": True,
        },
    ],
}


def test_each_engine_writes_tools_in_its_own_order_with_null_for_what_is_missing():
    tools = [OTHER_ORDER, SHORT, OTHER_KEYS]
    for engine, written in OF_ENGINES.items():
        assert json.dumps(written) == json.dumps(tools_in_form(engine, tools))
    assert json.dumps(tools) == json.dumps(tools_in_form(GIVEN, tools))


def test_there_is_a_form_for_every_engine_that_serves():
    assert [GIVEN, *(f"sglang-{each}" for each in VERSIONS), f"vllm-{VLLM_VERSION}"] == list(FORMS)


def test_what_engines_write_otherwise_is_named_once():
    unlike = ToolsUnlike(GIVEN)
    unlike.add(TOOLS * 2)
    first = ['adds "defer_loading": null']
    old = [*first, 'adds "strict": false', "writes keys in another order"]
    assert {"sglang-0.5.21": old, "sglang-0.5.23": first} == unlike.by_engine
    unlike.add([OTHER_KEYS])
    other = ['leaves out "icon"', "writes keys in another order", 'leaves out "returns"', 'adds "parameters": null']
    other.append('adds "defer_loading": true')
    expected = {"sglang-0.5.21": old, "sglang-0.5.23": first, "vllm-0.33.0": []}
    assert {engine: [*words, *(each for each in other if each not in words)] for engine, words in expected.items()} == (
        unlike.by_engine
    )


def test_nothing_differs_from_the_engine_whose_form_is_shown():
    for engine in OF_ENGINES:
        unlike = ToolsUnlike(engine)
        unlike.add([OTHER_ORDER, SHORT, OTHER_KEYS])
        assert set(OF_ENGINES) - {engine} == set(unlike.by_engine)
