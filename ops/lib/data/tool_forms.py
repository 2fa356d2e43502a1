"""Tools in the form in which the server of an engine gives them to a chat template.

A server reads the tools of a request into objects of its own, and the chat template gets what these write: keys in
another order, null where the client gave nothing, and only the keys that the engine knows. The forms are those of

    sglang-0.5.21, sglang-0.5.23    `Function` and `Tool` in sglang/srt/entrypoints/openai/protocol.py
    vllm-0.33.0                     `FunctionDefinition` in vllm/entrypoints/generate/base/protocol.py, and
                                    `ChatCompletionToolsParam` in vllm/entrypoints/openai/chat_completion/protocol.py

tests/sglang/test_sglang_tools.py and tests/vllm/test_vllm_tools.py compare prompts with those of the engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import define, field

Tool = Mapping[str, Any]
ToolsAs = Literal["given", "sglang-0.5.21", "sglang-0.5.23", "vllm-0.33.0"]

GIVEN: ToolsAs = "given"
DEFERRED = "defer_loading"
ONLY_IF_SET = ("strict", DEFERRED)  # of a function, in the engines that leave them out where they are null
SGLANG_ORDER = ("description", "name", "parameters", "strict", DEFERRED)
VLLM_ORDER = ("name", "description", "parameters", "strict", DEFERRED)


def tools_in_form(tools_as: str, tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools, as ingest writes them, in the form of an engine; as they are with "given"."""
    return [FORMS[tools_as](tool) for tool in tools]


def _given(tool: Tool) -> dict[str, Any]:
    return dict(tool)


def _sglang_0_5_21(tool: Tool) -> dict[str, Any]:
    read = {**_read(tool, SGLANG_ORDER), "strict": bool(tool["function"].get("strict"))}
    return {"type": tool["type"], "function": _without_null(read), DEFERRED: tool.get(DEFERRED)}


def _sglang_0_5_23(tool: Tool) -> dict[str, Any]:
    read = _read(tool, SGLANG_ORDER)
    in_order = {key: read[key] for key in (*tool["function"], *read) if key in read}
    return {"type": tool["type"], "function": _without_null(in_order), DEFERRED: tool.get(DEFERRED)}


def _vllm_0_33_0(tool: Tool) -> dict[str, Any]:
    deferred = {} if tool.get(DEFERRED) is None else {DEFERRED: tool[DEFERRED]}
    return {"type": tool["type"], "function": _without_null(_read(tool, VLLM_ORDER)), **deferred}


FORMS: Mapping[str, Callable[[Tool], dict[str, Any]]] = {
    GIVEN: _given,
    "sglang-0.5.21": _sglang_0_5_21,
    "sglang-0.5.23": _sglang_0_5_23,
    "vllm-0.33.0": _vllm_0_33_0,
}


def _read(tool: Tool, keys: Sequence[str]) -> dict[str, Any]:
    """The values of a function that an engine knows, null for those that it does not have; deferred as its tool is."""
    function = tool["function"]
    read = {key: function.get(key) for key in keys}
    return read if read[DEFERRED] is not None else {**read, DEFERRED: tool.get(DEFERRED)}


def _without_null(function: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in function.items() if value is not None or key not in ONLY_IF_SET}


@define
class ToolsUnlike:
    """What engines would show otherwise of the tools that are added, in the order in which it is found.

    shown_as: the form in which the tools are shown.
    """

    shown_as: str
    _found: dict[str, dict[str, None]] = field(factory=dict)
    _seen: set[object] = field(factory=set)

    def add(self, tools: Iterable[Tool]) -> None:
        """Compare tools; of those with the same keys, which differ in the same way, only the first."""
        for tool in tools:
            kind = tuple((key, value is None) for part in (tool, tool["function"]) for key, value in part.items())
            if kind in self._seen:
                continue
            self._seen.add(kind)
            [shown] = tools_in_form(self.shown_as, [tool])
            for engine in FORMS:
                if engine != GIVEN:
                    words = _differences(shown, FORMS[engine](tool))
                    self._found.setdefault(engine, {}).update(dict.fromkeys(words))

    @property
    def by_engine(self) -> dict[str, list[str]]:
        """What each engine does that shows tools otherwise, such as 'leaves out "returns"'."""
        return {engine: list(words) for engine, words in self._found.items() if words}


def _differences(shown: Tool, served: Tool) -> Iterator[str]:
    for ours, theirs in ((shown, served), (shown["function"], served["function"])):
        yield from (f"leaves out {json.dumps(key)}" for key in ours if key not in theirs)
        changed = (key for key, value in theirs.items() if key in ours and value != ours[key] and key != "function")
        yield from (f"writes {json.dumps(key)}: {json.dumps(theirs[key])}" for key in changed)
        yield from (f"adds {json.dumps(key)}: {json.dumps(theirs[key])}" for key in theirs if key not in ours)
        if [key for key in theirs if key in ours] != [key for key in ours if key in theirs]:
            yield "writes keys in another order"
