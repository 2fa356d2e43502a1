"""Conversations with tools: the rows of every form become one, and what cannot is named."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from format_reading import inject, read
from hypothesis import given, settings
from hypothesis import strategies as st
from own_samples import run_ingest
from PIL import Image
from pyarrow import parquet

from dsl.compile import compile_pipeline
from dsl.errors import ConfigError, DataError
from dsl.pipeline import Pipeline
from executor.keys.node_key import key_config
from ops.artifacts import Samples
from ops.ingest.image_values import ImageFinder
from ops.ingest.op import Ingest
from ops.ingest.plan import missing_here
from ops.ingest.row_forms import in_turns
from ops.ingest.row_values import REASONING
from ops.ingest.rows import CALLS_IN_TEXT, CHANNELS, OTHER_CALLS, PYTHON_CALLS, row_mistake, sample_of_row
from ops.ingest.sample import DroppedSample
from ops.ingest.tables import parquet_records
from ops.ingest.turn_forms import ARGUMENTS, MADE_ID, Call, Said, matched

ROWS = [json.loads(line) for line in Path(__file__).with_name("agent_rows.jsonl").read_text("utf-8").splitlines()]
COUNT = re.compile(r"^\d+ ")  # of a reason, which the detail has, so that reasons do not differ by it
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
F = {"name": "w", "description": "Weather.", "parameters": CITY}
T = [{"type": "function", "function": F}]
U = {"role": "user", "content": "Weather in Paris?"}
E = {"role": "assistant", "content": "Sunny."}
Row = dict[str, Any]


def call(place: int, city: str = "Paris", **more: Any) -> Row:
    function = {"name": "w", "arguments": {"city": city}, **more}
    return {"id": MADE_ID.format(place), "type": "function", "function": function}


def a(*calls: Row, content: str = "", **more: Any) -> Row:
    return {"role": "assistant", "content": content, **more, "tool_calls": list(calls)}


def t(content: Any, place: int = 1, name: str = "w") -> Row:
    return {"role": "tool", "content": content, "tool_call_id": MADE_ID.format(place), "name": name}


def tagged(city: str = "Paris") -> str:
    return f'<tool_call>\n{{"name": "w", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


STD = {"tools": T, "messages": [U, a(call(1)), t("sunny"), E]}
PAR = {"tools": T, "messages": [U, a(call(1), call(2, "Rome")), t("sunny"), t("rain", 2), E]}


def std(*turns: Row, **more: Any) -> Row:
    """A row of the user's question and other turns."""
    return {"tools": T, "messages": [U, *turns], **more}


def form_of(row: Row, **options: Any) -> Row:
    """The form of a row as in agent_rows.jsonl: {"normal"}, {"drop"} with its detail, or {"mistake"}.

    options: of sample_of_row.
    """
    row, mistake = in_turns(row)
    if mistake := mistake or row_mistake(row):
        return {"mistake": mistake}
    sample = sample_of_row(row, "1", ImageFinder(Path()), **options)
    if isinstance(sample, DroppedSample):
        return {"drop": sample.reason, "detail": sample.detail}
    turns = [{**turn.row(), "content": "".join(map(str, turn.content))} for turn in sample.turns]
    return {"normal": {**({"tools": list(sample.tools)} if sample.tools else {}), "messages": turns}}


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["name"])
def test_every_row_of_the_table_has_its_form(case):
    found = form_of(case["row"])
    if "drop" in case:
        assert COUNT.sub("", case["drop"]) in f"{found['drop']}: {found['detail']}"
        return
    assert {key: case[key] for key in ("normal", "mistake") if key in case} == found
    assert json.dumps(case.get("normal", {}).get("tools")) == json.dumps(found.get("normal", {}).get("tools"))


# In the style of each project's documentation; a form, or the start of "reason: detail", or of a mistake.
OWN: list[tuple[str, Row, Row | str]] = [
    ("OpenAI: a call without arguments", std(a({"id": "call00001", "function": {"name": "w", "arguments": ""}}),
     t("sunny"), E), std(a(call(1, arguments={})), t("sunny"), E)),
    ("OpenAI: null arguments", std(a({"id": "call00001", "function": {"name": "w", "arguments": None}})),
     std(a(call(1, arguments={})))),
    ("OpenAI: arguments under the key of Llama", std(a({"id": "call00001", "function": {"name": "w", "parameters":
     {"city": "Paris"}}}), t("sunny"), E), STD),
    ("ms-swift: arguments under the key of Llama", std({"role": "tool_call", "content": "{\"name\": \"w\", "
     "\"parameters\": {\"city\": \"Paris\"}}"}), std(a(call(1)))),
    ("Hermes: arguments under the key of Llama", std({"role": "assistant", "content": "<tool_call>{\"name\": \"w\", "
     "\"parameters\": {\"city\": \"Paris\"}}</tool_call>"}), std(a(call(1)))),
    ("xLAM: arguments under another key", {"query": U["content"], "tools": [F], "answers": [{"name": "w", "input":
     "{\"city\": \"Paris\"}"}]}, std(a(call(1)))),
    ("xLAM: arguments under an unknown key", {"query": U["content"], "tools": [F], "answers": [{"name": "w", "args":
     {"city": "Paris"}}]}, "a tool call without arguments: turn 2, w: other keys are \"args\""),
    ("OpenAI: arguments beside the function", std(a({"function": {"name": "w"}, "arguments": {"city": "Paris"}})),
     std(a(call(1)))),
    ("OpenAI: nothing but a name", std(a({"id": "call00001", "type": "function", "index": 0, "function":
     {"name": "w"}})), std(a(call(1, arguments={})))),
    ("OpenAI: content of parts", std(a(call(1)), {**t([{"type": "text", "text": "sunny"}])}, E), STD),
    ("OpenAI: content beside a call", std(a(call(1), content="I look."), t("sunny"), E),
     std(a(call(1), content="I look."), t("sunny"), E)),
    ("OpenAI: ids that repeat over turns are made anew", std(a({**call(1), "id": "c"}), {**t("sunny"),
     "tool_call_id": "c"}, a({**call(1), "id": "c"}), {**t("rain"), "tool_call_id": "c"}, E),
     std(a(call(1)), t("sunny"), a(call(2)), t("rain", 2), E)),
    ("OpenAI: some ids are none", std(a({**call(1), "id": "x"}, {**call(2, "Rome"), "id": None}),
     {"role": "tool", "tool_call_id": "x", "content": "sunny"}, {"role": "tool", "content": "rain"}, E), PAR),
    ("OpenAI: two chains", std(a(call(1)), t("sunny"), E, U, a(call(2)), t("rain", 2), E),
     std(a(call(1)), t("sunny"), E, U, a(call(2)), t("rain", 2), E)),
    ("OpenAI: a developer turn", std(E) | {"messages": [{"role": "developer", "content": "Be kind."}, U, E]},
     {"tools": T, "messages": [{"role": "system", "content": "Be kind."}, U, E]}),
    ("OpenAI: other keys of the row", std(a(call(1)), t("sunny"), E, parallel_tool_calls=False), STD),
    ("OpenAI: a strict tool", {"tools": [{"type": "function", "function": {**F, "strict": True}}], "messages": [U, E]},
     {"tools": [{"type": "function", "function": {**F, "strict": True}}], "messages": [U, E]}),
    ("OpenAI Responses: tools without a wrapper", {"tools": [{"type": "function", **F}], "messages": [U, E]}, std(E)),
    ("OpenAI, old: the result names the function", {"functions": [F, {"name": "v"}], "messages": [U, a(call(1)), E]},
     "tool calls without a result: turn 2, 1 of 1"),
    ("OpenAI, old: content and call", {"functions": [F], "messages": [U, {"role": "assistant", "content": "I look.",
     "function_call": {"name": "w", "arguments": "{\"city\": \"Paris\"}"}}, {"role": "function", "name": "w",
     "content": "sunny"}, E]}, std(a(call(1), content="I look."), t("sunny"), E)),
    ("results of two functions without ids", std(a(call(1), call(2, "Rome", name="v")), {"role": "tool", "name": "v",
     "content": "rain"}, {"role": "tool", "content": "sunny"}, E), std(a(call(1), call(2, "Rome", name="v")),
     t("rain", 2, "v"), t("sunny"), E)),
    ("ShareGPT: a thought before the call", {"tools": json.dumps([F]), "conversations": [{"from": "human",
     "value": U["content"]}, {"from": "function_call", "value": "<think>\nHm.\n</think>\n\n"
     "{\"name\": \"w\", \"arguments\": {\"city\": \"Paris\"}}"}]}, std(a(call(1), content="<think>\nHm.\n</think>"))),
    ("ShareGPT: arguments as JSON in JSON", {"tools": json.dumps([F]), "conversations": [{"from": "human",
     "value": U["content"]}, {"from": "function_call",
     "value": "{\"name\": \"w\", \"arguments\": \"{\\\"city\\\": \\\"Paris\\\"}\"}"}]}, std(a(call(1)))),
    ("ShareGPT: a value that is an object", {"tools": [F], "conversations": [{"from": "human", "value": U["content"]},
     {"from": "function_call", "value": {"name": "w", "arguments": {"city": "Paris"}}}]}, std(a(call(1)))),
    ("APIGen-MT: a system column", {"system": "Be kind.", "tools": json.dumps([F]), "conversations": [{"from": "human",
     "value": U["content"]}, {"from": "gpt", "value": "Sunny."}]},
     {"tools": T, "messages": [{"role": "system", "content": "Be kind."}, U, E]}),
    ("ms-swift: an empty list of calls", std({"role": "tool_call", "content": "[]"}, E), std(E)),
    ("ms-swift: a result that is an object", std({"role": "tool_call", "content": {"name": "w", "arguments":
     {"city": "Paris"}}}, {"role": "tool_response", "content": {"sky": "clear"}}, E),
     std(a(call(1)), t("{\"sky\": \"clear\"}"), E)),
    ("ms-swift: a call that is no JSON", std({"role": "tool_call", "content": "w(Paris)"}, E),
     "a tool call is not JSON: turn 2, w(Paris)"),
    ("Hermes: two calls in a turn", std({"role": "assistant", "content": "<tool_call>\n{\"name\": \"w\", \"arguments\":"
     " {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"w\", \"arguments\": {\"city\": \"Rome\"}}\n"
     "</tool_call>"}, {"role": "tool", "content": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n"
     "</tool_response>"}, E), PAR),
    ("Hermes: tools in Python's quotes", {"conversations": [{"from": "system", "value": "Tools are within <tools> "
     f"</tools> tags: <tools> {[F]!r} </tools>"}, {"from": "human", "value": U["content"]}, {"from": "gpt",
     "value": "Sunny."}]}, std(E)),
    ("Hermes: markup of XML without tools stays text", {"messages": [U, {"role": "assistant", "content":
     "<tool_call>\n<function=w>\n</tool_call>"}]}, {"messages": [U, {"role": "assistant", "content":
     "<tool_call>\n<function=w>\n</tool_call>"}]}),
    *((f"markup of other calls: {opening}", std({"role": "assistant", "content": f"Hm.{opening}{{\"name\": 1}}"},
     t("sunny"), E), f"calls in a text: turn 2: \"{opening}\"") for opening in OTHER_CALLS),
    *((f"a bare call under {key}", std({"role": "assistant", "content": json.dumps(made)}), "calls in a text: turn 2: ")
     for key in ARGUMENTS for made in ({"name": "w", key: {}}, [{"name": "w", key: {}}])),
    ("JSON that is no call", std({"role": "assistant", "content": "{\"name\": \"w\", \"parts\": 1}"}),
     std({"role": "assistant", "content": "{\"name\": \"w\", \"parts\": 1}"})),
    ("JSON that names no tool", std({"role": "assistant", "content": "{\"name\": \"x\", \"input\": 1}"}),
     std({"role": "assistant", "content": "{\"name\": \"x\", \"input\": 1}"})),
    ("markup of other calls in a thought", std({"role": "assistant", "content": "<think>[TOOL_CALLS]?</think>No."}),
     std({"role": "assistant", "content": "<think>[TOOL_CALLS]?</think>No."})),
    ("Glaive: tools in the prose of the system turn", {"messages": [{"role": "system", "content":
     "Functions: {\"name\": \"w\"}"}, U, {"role": "assistant", "content": "<functioncall> {\"name\": \"w\"}"}]},
     "calls in a text: turn 3: \"<functioncall>\""),
    ("Hermes: a call quoted in a thought", std({"role": "assistant", "content": "<think>Write <tool_call>"
     "{\"name\": \"w\", \"arguments\": {}}</tool_call>?</think>No."}), std({"role": "assistant", "content":
     "<think>Write <tool_call>{\"name\": \"w\", \"arguments\": {}}</tool_call>?</think>No."})),
    ("Hermes: a call behind a thought that quotes one", std({"role": "assistant", "content": "<think>A <tool_call>"
     "{}</tool_call>?</think>Yes.<tool_call>{\"name\": \"w\", \"arguments\": {\"city\": \"Paris\"}}</tool_call>"}),
     std(a(call(1), content="<think>A <tool_call>{}</tool_call>?</think>Yes."))),
    ("Qwen: results in the user's turn", std({"role": "assistant", "content": "<tool_call>\n{\"name\": \"w\", "
     "\"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"w\", \"arguments\": {\"city\": "
     "\"Rome\"}}\n</tool_call>"}, {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>\n"
     "<tool_response>\nrain\n</tool_response>"}, E), PAR),
    ("Qwen: results in user's turns", std(a(call(1), call(2, "Rome")), *({"role": "user", "content":
     [{"type": "text", "text": f"<tool_response>{each}</tool_response>"}]} for each in ("sunny", "rain")), E), PAR),
    ("a user who quotes a result", std({"role": "user", "content": "<tool_response>x</tool_response>"}, E),
     std({"role": "user", "content": "<tool_response>x</tool_response>"}, E)),
    ("a user's words beside a result", std(a(call(1)), {"role": "user", "content":
     "<tool_response>x</tool_response>\nAnd?"}, E), "tool calls without a result: turn 2, 1 of 1"),
    ("results with ids for calls without", std(a({"function": {"name": "w", "arguments": {"city": "Paris"}}}),
     {"role": "tool", "tool_call_id": "x1", "content": "sunny"}, E), STD),
    ("Hermes: broken JSON", std({"role": "assistant", "content": "<tool_call>{\"name\": w}</tool_call>"}),
     "a tool call is not JSON: turn 2, {\"name\": w}"),
    ("Hermes: a system turn without tools stays", {"tools": T, "messages": [{"role": "system", "content":
     "Use <tools>."}, U, E]}, {"tools": T, "messages": [{"role": "system", "content": "Use <tools>."}, U, E]}),
    ("xLAM: lists, types of Python", {"query": U["content"], "tools": [{"name": "w", "description": "Weather.",
     "parameters": {"city": {"type": "List[str]"}, "at": {"type": "Dict[str, int], optional", "default": None},
     "odd": {"type": "Callable"}}}], "answers": [{"name": "w", "arguments": {"city": ["Paris"]}}]},
     {"tools": [{"type": "function", "function": {"name": "w", "description": "Weather.", "parameters":
     {"type": "object", "properties": {"city": {"type": "array"}, "at": {"type": "object", "default": None}, "odd":
     {"type": "string"}}, "required": ["city", "odd"]}}}], "messages": [U, a(call(1, arguments={"city": ["Paris"]}))]}),
    ("xLAM: no parameters", {"query": "Go.", "tools": "[{\"name\": \"w\", \"parameters\": {}}]",
     "answers": "[{\"name\": \"w\", \"arguments\": {}}]"}, {"tools": [{"type": "function", "function": {"name": "w",
     "parameters": {"type": "object", "properties": {}}}}], "messages": [{"role": "user", "content": "Go."},
     a(call(1, arguments={}))]}),
    ("xLAM: no answer", {"query": "Go.", "tools": [F], "answers": "[]"}, "no answer"),
    ("Anthropic: a call and nothing else", std({"role": "assistant", "content": [{"type": "tool_use",
     "id": "call00001", "name": "w", "input": {"city": "Paris"}}]}, {"role": "user", "content": [{"type": "tool_result",
     "tool_use_id": "call00001", "content": "sunny"}]}, E), STD),
    ("Anthropic: results in another order", std({"role": "assistant", "content": [{"type": "tool_use", "id": "x",
     "name": "w", "input": {}}, {"type": "tool_use", "id": "y", "name": "w", "input": {}}]}, {"role": "user", "content":
     [{"type": "tool_result", "tool_use_id": "y", "content": "2"}, {"type": "tool_result", "tool_use_id": "x"}]}, E),
     std(a({**call(1, arguments={}), "id": "x"}, {**call(2, arguments={}), "id": "y"}), {**t("2"), "tool_call_id": "y"},
     {**t(""), "tool_call_id": "x"}, E)),
    ("Anthropic: redacted thinking", std({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"},
     {"type": "text", "text": "Sunny."}]}), "redacted thinking: turn 2"),
    ("Anthropic: custom and cached tools", {"tools": [{"type": "custom", "name": "w", "description": "Weather.",
     "input_schema": CITY, "cache_control": {"type": "ephemeral"}}], "messages": [U, E]}, std(E)),
    ("Anthropic: a tool of the provider", {"tools": [{"type": "web_search_20250305", "name": "web_search"}],
     "messages": [U, E]}, "a tool that is no function: \"web_search_20250305\""),
    ("Anthropic: a call of the provider's", std({"role": "assistant", "content": [{"type": "server_tool_use"}]}),
     "a tool that is no function: \"server_tool_use\""),
    ("Nemotron: tools_json, chat_template_kwargs", {"tools_json": json.dumps(T), "messages": json.dumps(
     STD["messages"]), "chat_template_kwargs": {"enable_thinking": True}}, STD),
    ("Nemotron: input, output", {"input": [U], "output": "Sunny.", "reasoning": "off", "system_prompt": "Be kind."},
     {"messages": [{"role": "system", "content": "Be kind."}, U, E]}),
    ("gpt-oss: thinking beside a call", std(a(call(1), thinking="Hm."), t("sunny"), E),
     std(a(call(1), reasoning_content="Hm."), t("sunny"), E)),
    ("BFCL: dict is object, a property named type is none", {"tools": [{"name": "w", "parameters": {"type": "dict",
     "properties": {"type": {"type": "string", "default": "dict"}, "at": {"type": "array", "items":
     {"type": "dict"}}}}}], "messages": [U, E]},
     {"tools": [{"type": "function", "function": {"name": "w", "parameters": {"type": "object",
     "properties": {"type": {"type": "string", "default": "dict"}, "at": {"type": "array", "items":
     {"type": "object"}}}}}}], "messages": [U, E]}),
    ("nulls of JSON stay", std(a(call(1, arguments={"city": None}))), std(a(call(1, arguments={"city": None})))),
    ("ToolACE", {"conversations": [{"from": "system", "value": "Invoke: [{\"name\": \"Get the.weather\"}]"}, {"from":
     "human", "value": "Go."}, {"from": "gpt", "value": "[Get the.weather(city=\"Paris\")]"}, {"from": "tool",
     "value": "[]"}]}, "python calls in a text: turn 3"),
    ("ToolACE: a text before the call", std({"role": "assistant", "content": "Sure.\n[w(city=\"Paris\")]"}),
     "python calls in a text: turn 2"),
    ("ToolACE: a list in a sentence", std({"role": "assistant", "content": "See [w(city=\"Paris\")]"}),
     std({"role": "assistant", "content": "See [w(city=\"Paris\")]"})),
    ("an answer like Python's calls, of no tool", {"messages": [U, {"role": "assistant", "content": "[w(city=1)]"}]},
     {"messages": [U, {"role": "assistant", "content": "[w(city=1)]"}]}),
    ("a call of a user", std({"role": "user", "content": "x", "tool_calls": [call(1)]}, E),
     "a tool call outside an answer: turn 2, role \"user\""),
    ("two calls with one id", std(a(call(1), call(1)), t("sunny"), E),
     "two tool calls of a turn have the same id: turn 2, \"call00001\""),
    ("more calls than a turn has", std(a(*map(call, range(1, 1002)))),
     "more than 1,000 tool calls in a turn: turn 2, 1001"),
    ("thoughts of parallel calls", std(*({"role": "tool_call", "content": {"name": "w", "arguments": "null"},
     "reasoning_content": each} for each in "xy")), std(a(*(call(each, arguments={}) for each in (1, 2)),
     reasoning_content="x\ny"))),
    ("two calls without results", std(a(call(1), call(2)), E), "tool calls without a result: turn 2, 2 of 2"),
    ("only one of two results, at the end", std(a(call(1), call(2)), t("sunny")),
     "tool calls without a result: turn 2, 1 of 2"),
    ("a second result", std(a(call(1)), t("sunny"), t("rain"), E), "a tool result without a call: turn 4, "),
    ("a result for another id", std(a(call(1)), t("sunny", 2), E), "a tool result for no open call: turn 3, a tool "
     "result for \"call00002\", which is no open call"),
    ("half a surrogate pair in an argument", std(a(call(1, "\ud800"))), "invalid text"),
    ("an argument that is no number", std(a({"function": {"name": "w", "arguments": "{\"city\": NaN}"}})),
     "the arguments of a tool call are not JSON"),
    ("arguments nested too deeply", std(a({"function": {"name": "w", "arguments": "{\"a\": " + "[" * 120 + "]" * 120 +
     "}"}})), "the arguments of a tool call are not JSON: turn 2, w: nested in more than 100 levels"),
    ("tools nested too deeply", {"tools": "[{\"name\": \"w\", \"x\": " + "[" * 120 + "]" * 120 + "}]", "messages":
     [U, E]}, "tools are not JSON: nested in more than 100 levels"),
    ("a call that is a text", std({"role": "assistant", "tool_calls": "w()"}),
     "messages[1]: \"tool_calls\" must be a list"),
    ("a function_call that is a text", std({"role": "assistant", "function_call": "w()"}),
     "messages[1]: \"function_call\" must be an object"),
    *((f"{key} that is no text", std({"role": "assistant", "content": "Hm.", key: each}),
     f"messages[1]: \"{key}\" must be a string") for key in REASONING for each in ({"text": "r"}, ["r"], 5)),
    *((f"{key} that is a setting", std({**E, key: each}), std(E)) for key in REASONING for each in (True, {"a": None})),
    ("calls in the text too", std(a(call(1), content="I look.\n" + tagged()), t("sunny"), E),
     std(a(call(1), content="I look."), t("sunny"), E)),
    ("calls in parts of the text too", std(a(call(1), call(2, "Rome"), content=[{"type": "text", "text": tagged()},
     {"type": "text", "text": "\n" + tagged("Rome")}]), t("sunny"), t("rain", 2), E), PAR),
    ("OpenAI, old: the call in the text too", {"functions": [F], "messages": [U, {"role": "assistant", "content":
     tagged(), "function_call": {"name": "w", "arguments": "{\"city\": \"Paris\"}"}}]}, std(a(call(1)))),
    ("Anthropic: the call in the text too", std({"role": "assistant", "content": [{"type": "text", "text": tagged()},
     {"type": "tool_use", "id": "call00001", "name": "w", "input": {"city": "Paris"}}]}), std(a(call(1)))),
    ("other calls in the text", std(a(call(1), content=tagged("Rome"))), "other calls in the text of an answer than "
     "under its key: turn 2, {\"name\": \"w\", \"arguments\": {\"city\": \"Rome\"}}"),
    ("one of two calls in the text", std(a(call(1), call(2, "Rome"), content=tagged())), "other calls in the text"),
    ("a call in the text that is no JSON", std(a(call(1), content="<tool_call>{w}</tool_call>")),
     "a tool call is not JSON: turn 2, {w}"),
    ("a call quoted in a thought", std(a(call(1), content=f"<think>{tagged('Rome')}</think>")),
     std(a(call(1), content=f"<think>{tagged('Rome')}</think>"))),
    ("a thought in the text too", std({"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSunny.",
     "reasoning_content": "Hm.\n"}), std({**E, "reasoning_content": "Hm.\n"})),
    ("a thought in the text too, opened by the prompt", std({"role": "assistant", "content": "Hm.\n</think>\n\nSunny.",
     "reasoning": "Hm."}), std({**E, "reasoning_content": "Hm."})),
    ("thought and call in the text too", std(a(call(1), content=f"<think>Hm.</think>I look.{tagged()}",
     thinking="Hm.")), std(a(call(1), content="I look.", reasoning_content="Hm."))),
    ("Hermes: the thought under a key too", std({"role": "assistant", "content": f"<think>Hm.</think>{tagged()}",
     "reasoning_content": "Hm."}), std(a(call(1), reasoning_content="Hm."))),
    ("Hermes: the calls in turns of their own too", std({"role": "assistant", "content": f"I look.{tagged()}"
     f"{tagged('Rome')}"}, *({"role": "tool_call", "content": json.dumps({"name": "w", "arguments": {"city": city}})}
     for city in ("Paris", "Rome")), t("sunny"), t("rain", 2), E),
     std(a(call(1), call(2, "Rome"), content="I look."), t("sunny"), t("rain", 2), E)),
    ("Hermes: another call in a turn of its own", std({"role": "assistant", "content": tagged()}, {"role": "tool_call",
     "content": "{\"name\": \"w\", \"arguments\": {\"city\": \"Rome\"}}"}), std(a(call(1), call(2, "Rome")))),
    ("ShareGPT: the thought under a key too", std({"role": "tool_call", "content": "<think>Hm.</think>{\"name\": "
     "\"w\", \"arguments\": {\"city\": \"Paris\"}}", "reasoning_content": "Hm."}),
     std(a(call(1), reasoning_content="Hm."))),
    *(("another thought in the text", std({"role": "assistant", "content": f"{each}</think>Sunny.", "reasoning":
     "Hm."}), "another thought in the text of an answer than under its key: turn 2, Oh.")
     for each in ("<think>Oh.", "Oh.")),
    *(("a text about the tags", std({"role": "assistant", "content": each, "reasoning": "Hm."}), std({"role":
     "assistant", "content": each, "reasoning_content": "Hm."})) for each in ("Use <think> and </think>.", "<think>")),
    ("tools without a name", {"tools": [{"type": "function"}], "messages": [U, E]}, "a tool has no name"),
    ("tools that are no JSON", {"tools": "w, v", "messages": [U, E]}, "\"tools\" must be a list of tools, or its JSON"),
    ("messages that are no JSON", {"messages": "[{"}, "\"messages\" must be a list of turns, or its JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "form"), [case[1:] for case in OWN], ids=[case[0] for case in OWN])
def test_rows_in_the_style_of_each_project_have_their_form(row, form):
    found = form_of(row)
    if isinstance(form, str):
        shown = found.get("mistake") or ": ".join(filter(None, (found["drop"], found["detail"])))
        assert shown.startswith(form)
    else:
        assert form == found["normal"]


NAMES = st.sampled_from(["w", "v", "get the.time"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("a<>{}\"'\\ \n", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.tuples(NAMES, st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=2))
ROUNDS = st.lists(st.tuples(st.lists(CALLS, max_size=3), st.randoms(use_true_random=False)), min_size=1, max_size=4)


def conversation(rounds: list, with_ids: bool) -> Row:
    """A row of a user's turn and rounds of calls, whose results come in any order if they have ids."""
    turns: list[Row] = [U]
    count = 0
    for calls, drawn in rounds:
        own = [f"id{count + place}" for place in range(len(calls))]
        count += len(calls)
        made = [
            {"function": {"name": name, "arguments": json.dumps(arguments)}, **({"id": each} if with_ids else {})}
            for each, (name, arguments) in zip(own, calls, strict=True)
        ]
        turns.append({"role": "assistant", "content": "So.", "tool_calls": made})
        results = [
            {"role": "tool", "content": f"of {each}", **({"tool_call_id": each} if with_ids else {"name": name})}
            for each, (name, _) in zip(own, calls, strict=True)
        ]
        if with_ids:
            drawn.shuffle(results)
        turns += results
    return {"tools": [{"name": name} for name in ("w", "v", "get the.time")], "messages": [*turns, E]}


@given(rounds=ROUNDS, with_ids=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_are_unique_results_match_and_the_form_is_a_fixed_point(rounds, with_ids):
    form = form_of(conversation(rounds, with_ids))["normal"]
    calls = [each for turn in form["messages"] for each in turn.get("tool_calls", ())]
    results = [turn for turn in form["messages"] if turn["role"] == "tool"]
    ids = [each["id"] for each in calls]
    assert len(set(ids)) == len(ids)
    assert {each["id"]: each["function"]["name"] for each in calls} == {
        turn["tool_call_id"]: turn["name"] for turn in results
    }
    assert [arguments for given_calls, _ in rounds for _, arguments in given_calls] == [
        each["function"]["arguments"] for each in calls
    ]
    if with_ids:
        assert all(turn["content"] == f"of {turn['tool_call_id']}" for turn in results)
    assert json.dumps(form) == json.dumps(form_of(form)["normal"])


@pytest.mark.parametrize("row", [case["row"] for case in ROWS if "normal" in case], ids=lambda row: list(row))
def test_the_form_of_a_row_put_in_again_is_itself(row):
    form = form_of(row)["normal"]
    assert json.dumps(form) == json.dumps(form_of(form)["normal"])


def test_calls_keep_their_places_among_ids_made_for_all_of_them():
    turns = [
        Said("assistant", calls=(Call(None, "w", {}), Call("x", "v", {}))),
        Said("tool", call_id="x"),
        Said("tool"),
    ]
    assert [turn.call_id for turn in matched(turns)] == [None, "call00002", "call00001"]


def test_samples_with_tools_are_written_with_their_keys_in_order_and_those_without_as_before(tmp_path):
    tool = {"type": "function", "function": {"name": "w", "parameters": {"z": 1, "a": 2}, "description": "Weather."}}
    with_tools = {"tools": [tool], "messages": [U, a(call(1, arguments={"z": 1, "a": 2})), t("sunny"), E]}
    _, rows, _ = run_ingest(tmp_path / "a", [with_tools, {"messages": [U, E]}])
    text = {"type": "text", "text": ""}
    assert rows[0]["conversations"] == [
        {**turn, "content": [{**text, "text": turn["content"]}] if turn["content"] else []}
        for turn in with_tools["messages"]
    ]
    assert json.dumps(rows[0]["tools"]) == json.dumps([tool])
    lines = (tmp_path / "a" / "out" / "samples.jsonl").read_text().splitlines()
    assert lines[0].index('"z": 1') < lines[0].index('"a": 2')
    assert sorted(rows[1]) == ["category", "conversations", "id", "images", "split"]
    assert lines[1] == json.dumps(rows[1], sort_keys=True)


def test_tools_pass_inject_images_with_their_keys_in_order(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps(STD | {"tools": [{"name": "w", "z": 1, "a": 2}]}) + "\n")
    stage, rows, _ = read(tmp_path / "data.jsonl", tmp_path / "ingest")
    samples = inject(stage.artifact(Samples), tmp_path / "inject")
    row = json.loads((samples.path / "samples.jsonl").read_text("utf-8"))
    assert json.dumps(row["tools"]) == '[{"type": "function", "function": {"name": "w", "z": 1, "a": 2}}]'
    assert row["messages"] == rows[0]["conversations"]


def test_nulls_of_a_table_are_removed_from_tools_and_arguments(tmp_path):
    other = {
        "type": "function",
        "function": {"name": "v", "parameters": {"type": "object", "properties": {"at": {"type": "int"}}}},
    }
    second = a({"id": "x", "type": "function", "function": {"name": "v", "arguments": {"at": 1}}})
    rows = [{**STD, "tools": [*T, other]}, {"tools": [other], "messages": [U, second]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    _, written, _ = read(tmp_path / "data.parquet", tmp_path)
    assert written[0]["tools"][0] == T[0]
    assert written[0]["conversations"][1]["tool_calls"] == [call(1)]
    assert written[1]["conversations"][1]["tool_calls"][0]["function"]["arguments"] == {"at": 1}


def test_nulls_of_a_table_are_removed_from_the_tools_of_bfcl_and_from_results(tmp_path):
    properties = [{"city": {"type": "string"}}, {"at": {"type": "integer"}}]
    tools = [[{"name": "w", "parameters": {"type": "dict", "properties": each}}] for each in properties]
    parquet.write_table(pyarrow.Table.from_pylist([{"function": each} for each in tools]), tmp_path / "bfcl.parquet")
    assert tools == [record.row["function"] for record in parquet_records(tmp_path / "bfcl.parquet")]
    results = [[{"sky": "clear"}, {"t": 20}], [{"wind": 3}]]
    rows = [{"tools": T, "messages": [a(call(1)), {"role": "tool", "content": each}]} for each in results]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"asked": "?", "messages": row["messages"][1:]} for row in rows]),
        tmp_path / "results.parquet",
    )
    read_back = [record.row["messages"][0]["content"] for record in parquet_records(tmp_path / "results.parquet")]
    assert results == read_back
    part = {"type": "tool_result", "tool_use_id": "x", "content": [{"sky": "clear"}, {"t": 20}]}
    parquet.write_table(pyarrow.Table.from_pylist([{"parts": [part]}]), tmp_path / "parts.parquet")
    assert [part] == next(parquet_records(tmp_path / "parts.parquet")).row["parts"]


CALLED_IN_TEXT = {
    "Python": '[w(city="Paris")]',
    "Python behind a text": 'Sure.\n[w(city="Paris")]',
    "Mistral": '[TOOL_CALLS][{"name": "w", "arguments": {}}]',
    "bare": '{"name": "w", "parameters": {}}',
}


@pytest.mark.parametrize("text", CALLED_IN_TEXT.values(), ids=CALLED_IN_TEXT)
def test_calls_in_a_text_stay_there_as_plain_chat_if_the_config_says_so(tmp_path, text):
    called, system = {"role": "assistant", "content": text}, {"role": "system", "content": 'Invoke: {"name": "w"}'}
    turns = [system, U, called, {"role": "tool", "content": {"t": 20}}, E, U, a(call(1)), t("sunny"), E]
    row = {"tools": T, "messages": turns}
    assert form_of(row)["drop"] in (PYTHON_CALLS, CALLS_IN_TEXT)
    answered = [system, U, called, {"role": "user", "content": '{"t": 20}'}, E, U, a(call(1)), t("sunny"), E]
    assert {"tools": T, "messages": answered} == form_of(row, tool_syntax="text")["normal"]
    without = {"messages": turns[:5]}
    _, [written], _ = run_ingest(tmp_path, [without], tool_syntax="text")
    assert ["system", "user", "assistant", "user", "assistant"] == [turn["role"] for turn in written["conversations"]]
    assert "tools" not in written


def test_channels_in_a_text_are_refused_whatever_the_syntax():
    row = {"messages": [U, {"role": "assistant", "content": "<|channel|>final<|message|>Hm."}]}
    assert CHANNELS == form_of(row, tool_syntax="text")["drop"]


def test_ids_of_kimi_count_over_the_conversation_and_agree_in_calls_and_results(tmp_path):
    turns = [U, a(call(1), call(2, "Rome", name="v")), t("rain", 2, "v"), t("sunny"), E, U, a(call(3)), t("wet", 3), E]
    _, [row], _ = run_ingest(tmp_path, [{"tools": [F, {"name": "v"}], "messages": turns}], call_ids="kimi")
    ids = [each["id"] for turn in row["conversations"] for each in turn.get("tool_calls", ())]
    assert ["functions.w:0", "functions.v:1", "functions.w:2"] == ids
    results = [(turn["tool_call_id"], turn["name"]) for turn in row["conversations"] if turn["role"] == "tool"]
    assert [("functions.v:1", "v"), ("functions.w:0", "w"), ("functions.w:2", "w")] == results


def test_default_tools_are_those_of_rows_without_any(tmp_path, capsys):
    (tmp_path / "tools.json").write_text(json.dumps([F]))
    rows = [{"messages": STD["messages"]}, {"messages": [U, E]}, {"tools": [{"name": "v"}], "messages": [U, E]}]
    _, written, summary = run_ingest(tmp_path, rows, default_tools=str(tmp_path / "tools.json"))
    assert [[tool["function"]["name"] for tool in row["tools"]] for row in written] == [["w"], ["w"], ["v"]]
    assert {} == summary["dropped"]
    assert "1 samples call tools" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w, v", '"tools" must be a list of tools'),
        ("[]", "has no tools"),
        ("[{}, {}]", "has no tools"),
        ('[{"description": "Weather."}]', "a tool has no name"),
        ('[{"type": "web_search"}]', 'a tool that is no function: "web_search"'),
    ],
)
def test_a_wrong_file_of_default_tools_is_named_by_plan_and_by_the_stage(tmp_path, text, message):
    (tmp_path / "tools.json").write_text(text)
    with pytest.raises(DataError, match=r"tools\.json: default_tools: ") as error:
        run_ingest(tmp_path, [{"messages": [U, E]}], default_tools=str(tmp_path / "tools.json"))
    assert message in str(error.value)
    config = Ingest(source=str(tmp_path / "data.jsonl"), seed=0, default_tools=str(tmp_path / "tools.json"))
    assert {"default_tools": str(error.value)} == missing_here(config)


@pytest.mark.parametrize(
    ("field", "value"), [("default_tools", "tools.json"), ("tool_syntax", "text"), ("call_ids", "kimi")]
)
def test_the_built_in_sample_takes_no_fields_of_tools(field, value):
    with pytest.raises(ConfigError, match=rf"{field}.* for data of your own: the built-in sample has no tools"):
        Ingest(source="builtin:digits", seed=0, **{field: value})


def test_a_config_without_default_tools_has_the_key_that_it_had_before_that_field(tmp_path):
    p = Pipeline("keys")
    p.node("data", Ingest(source="builtin:digits", seed=0))
    assert "default_tools" not in key_config(compile_pipeline(p).nodes["data"])


@pytest.mark.parametrize("different", ["tools", "arguments"])
def test_other_tools_or_arguments_are_another_content(tmp_path, capsys, different):
    other = {**STD, "tools": [{"name": "w"}]} if different == "tools" else std(a(call(1, "Rome")), t("sunny"), E)
    run_ingest(tmp_path, [{**STD, "split": "train"}, {**other, "split": "test"}])
    assert "have the same turns" not in capsys.readouterr().out
    run_ingest(tmp_path / "same", [{**STD, "split": "train"}, {**STD, "split": "test"}])
    assert "1 of 1 samples of test have the same turns" in capsys.readouterr().out


def test_what_is_left_out_of_rows_is_counted(tmp_path, capsys):
    listing = {"role": "system", "content": f"<tools>{json.dumps([F])}</tools>"}
    rows = [
        {**STD, "chat_template_kwargs": {"enable_thinking": True}},
        {**STD, "chat_template_kwargs": {"enable_thinking": None}, "id": "b"},
        {"input": [U], "output": "Sunny.", "reasoning": "on"},
        {"messages": [listing, U, E], "reasoning": "because"},
        std(a(call(1, name="delete_all"), call(2))),
    ]
    run_ingest(tmp_path, rows)
    out = capsys.readouterr().out
    assert '1 samples have "chat_template_kwargs" of their own, which is left out' in out
    assert '1 samples have "reasoning" of their own, which is left out' in out
    assert "1 samples have a call of a function that is not among their tools, which is learnt like any other" in out
    assert "1 samples have a system turn that lists the tools, which is left out" in out


def test_images_stand_in_results_as_in_a_users_turn(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    row = {**std(a(call(1)), t("<image>\nThe map."), E), "images": ["a.png"]}
    _, rows, _ = run_ingest(tmp_path, [row])
    assert [part["type"] for part in rows[0]["conversations"][2]["content"]] == ["image", "text"]
    assert rows[0]["images"][0]["size"] == 1


def test_an_image_within_a_result_of_anthropic_is_found(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    use = {"type": "tool_use", "id": "x", "name": "w", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "image": "a.png"}]}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}, E]
    (tmp_path / "data.jsonl").write_text(json.dumps(std(*turns)) + "\n")
    config = Ingest(source=str(tmp_path / "data.jsonl"), seed=0)
    assert {"a.png": tmp_path / "a.png"} == config.external_files()
    _, rows, _ = read(tmp_path / "data.jsonl", tmp_path / "out")
    assert [{"type": "image"}] == rows[0]["conversations"][2]["content"]


FORMS: dict[str, list[tuple[str, Row, Row]]] = {}
for name, given_row, normal in [
    *(case for case in OWN if isinstance(case[2], dict)),
    *((f"the table: {case['name']}", case["row"], case["normal"]) for case in ROWS if "normal" in case),
]:
    own_form = name.partition(":")[0] if ":" in name else "others"
    FORMS.setdefault(own_form, []).append((name, given_row, normal))
NULLS = ("nulls of JSON stay", "xLAM: lists, types of Python")  # which mean something, and a table removes them


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_each_form_are_the_same_from_files_of_every_format(tmp_path, form):
    def forms(source: Path) -> list[Row]:
        _, rows, _ = read(source, tmp_path / f"of {source.name}", require_answers=False)
        found = []
        for row in rows:
            turns = [
                {**turn, "content": "".join(part["text"] for part in turn["content"])} for turn in row["conversations"]
            ]
            found.append({**({"tools": row["tools"]} if "tools" in row else {}), "messages": turns})
        return found

    named, given_rows, expected = zip(*FORMS[form], strict=True)
    lines = list(map(json.dumps, given_rows))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "rows.json").write_text("[" + ",\n".join(lines) + "]")
    assert list(expected) == forms(tmp_path / "rows.jsonl") == forms(tmp_path / "rows.json")
    folder, kept = tmp_path / "tables", []
    folder.mkdir()
    for place, (row, normal) in enumerate(zip(given_rows, expected, strict=True)):
        try:
            table = pyarrow.Table.from_pylist([row])
            parquet.write_table(table, folder / f"{place:03}.parquet")
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            (folder / f"{place:03}.parquet").unlink(missing_ok=True)  # values of two types, or empty objects
            continue
        if named[place] in NULLS:
            (folder / f"{place:03}.parquet").unlink()
        else:
            kept.append(normal)
    assert kept == (forms(folder) if kept else [])
    assert kept


def test_a_csv_of_xlam_is_read(tmp_path):
    row = next(case for case in ROWS if case["name"] == "xLAM")
    with (tmp_path / "data.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row["row"]))
        writer.writeheader()
        writer.writerow(row["row"])
    _, written, _ = read(tmp_path / "data.csv", tmp_path)
    assert written[0]["tools"] == row["normal"]["tools"]


def test_a_call_without_a_text_is_no_turn_of_nothing_but_an_image(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    (tmp_path / "data.jsonl").write_text(json.dumps({**STD, "images": ["a.png"]}) + "\n")
    stage, _, _ = read(tmp_path / "data.jsonl", tmp_path / "ingest")
    samples = inject(stage.artifact(Samples), tmp_path / "inject")
    row = json.loads((samples.path / "samples.jsonl").read_text("utf-8"))
    assert [len(turn["content"]) for turn in row["messages"]] == [2, 0, 1, 1]
