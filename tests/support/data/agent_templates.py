"""Small chat templates with tools, each with one rule of the real ones, and what a target would write after its prompt.

A template's `writes` is the slow reference of an answer: the text by hand, from the answer itself, never from a
rendering of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attrs import frozen

Answer = dict[str, Any]

SHOWN = """\
{%- macro shown(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
HEAD = """\
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools|tojson) + '<|im_end|>\\n' }}{%- endif %}
"""
CALLS = """\
{%- for call in message.tool_calls %}
    {{- '\\n' if message.content or not loop.first else '' }}
    {%- set asked = {'name': call.function.name, 'arguments': call.function.arguments} %}
    {{- '<tool_call>\\n' + (asked|tojson) + '\\n</tool_call>' }}
{%- endfor %}
"""
OTHERS = """\
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
"""
LAST_USER = """\
{%- set ns = namespace(user=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.user = loop.index0 %}{%- endif %}{%- endfor %}
"""

# The history is what was written.
EXTENDS = (
    HEAD
    + "{%- for message in messages %}"
    + OTHERS
    + "{%- else %}{{- '<|im_start|>assistant\\n' + message.content }}"
    + CALLS
    + "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Thoughts are shown after the last user turn only, an empty one in the last answer only; without thinking, the prompt
# holds an empty one.
STRIPS = (
    HEAD
    + LAST_USER
    + "{%- for message in messages %}"
    + OTHERS
    + """\
    {%- else %}
        {{- '<|im_start|>assistant\\n' }}
        {%- set thought = message.reasoning_content or '' %}
        {%- if loop.index0 > ns.user and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
"""
    + CALLS
    + """\
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)

# The prompt opens a thought; answers without one are shown without.
OPENS = (
    HEAD
    + LAST_USER
    + "{%- for message in messages %}"
    + OTHERS
    + """\
    {%- else %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.user and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
"""
    + CALLS
    + """\
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""
)

# The prompt holds an empty thought in tags of its own, which history never shows; a call ends with another token than
# a text, and its results stand inside the model's turn.
PREFILLED = """\
{%- if tools %}{{- '<|turn>system\\nTools: ' + (tools|tojson) + '<turn|>\\n' }}{%- endif %}
{%- set ns = namespace(open=false) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|result>' + message.content + '<result|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if not ns.open %}{{- '<|turn>model\\n' }}{%- endif %}
        {%- if message.thinking %}{{- '<|channel>thought\\n' + message.thinking + '\\n<channel|>' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call>call:' + call.function.name + (call.function.arguments|tojson) + '<tool_call|>' }}
        {%- endfor %}
        {%- set ns.open = message.tool_calls|length > 0 %}
        {{- '<|tool_response>' if message.tool_calls else '<turn|>\\n' }}
    {%- else %}
        {{- '<|turn>' + message.role + '\\n' + message.content + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}
    {{- '<|turn>model\\n' }}
    {%- if not (enable_thinking is defined and enable_thinking) %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}
{%- endif %}
"""

# Nothing ends an answer but the header of the next message.
ENDLESS = """\
{%- if tools %}{{- '<|system|>Tools: ' + (tools|tojson) }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|observation|>' + message.content }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments|tojson) + '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""

# A line break in a result depends on whether it is the last message; the text beside a call is lost.
REWRITES = (
    HEAD
    + """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>tool\\n' + message.content + ('\\n' if loop.last else '') + '<|im_end|>\\n' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments|tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)

# Channels: the analysis of a call is dropped once a final answer follows; of two calls in a turn only one is shown.
CHANNELS = """\
{%- if tools %}{{- '<|start|>system<|message|>Tools: ' + (tools|tojson) + '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set later = namespace(final=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.final = true %}{%- endif %}
        {%- endfor %}
        {%- if message.thinking and not later.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=' + call.name + '<|message|>' + (call.arguments|tojson) + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Tools stand before the last user turn; only ids of 9 letters and digits are taken, and they are written.
MOVES_TOOLS = (
    LAST_USER
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- for call in message.tool_calls %}
        {%- if call.id|length != 9 %}{{- raise_exception('ids must have 9 letters') }}{%- endif %}
    {%- endfor %}
    {%- if message.role == 'user' %}
        {%- if loop.index0 == ns.user and tools %}{{- '[TOOLS]' + (tools|tojson) + '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content + '[/RESULT]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS]' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + (call.function.arguments|tojson) + call.id }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
"""
)

# The day, and one call a turn.
DATED = (
    "{{- 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}"
    "{%- for message in messages %}{%- if message.tool_calls and message.tool_calls|length > 1 %}"
    "{{- raise_exception('one call at once') }}{%- endif %}{%- endfor %}" + EXTENDS
)

# The end of a turn once more behind the last message, which no target writes.
ENDS_TWICE = EXTENDS + "{%- if not add_generation_prompt %}{{- '<|im_end|>' }}{%- endif %}"

# A generation prompt behind all messages, asked for or not, with a thought that history never shows; answers
# have a tag that begins as that of the thought.
ALWAYS_PROMPTS = (
    EXTENDS.replace("assistant\\n' + message", "assistant\\n<|start_text|>' + message").partition(
        "{%- if add_generation_prompt %}"
    )[0]
    + "{{- '<|im_start|>assistant\\n<|start_thought|><|end_thought|>' }}"
)

# No thoughts, neither in the prompt nor in history; one in a text is a part of the text.
CLOSED = EXTENDS.replace("assistant\\n'", "assistant\\n</think>'")

# The prompt begins a thought in words, which history does not show.
IN_WORDS = EXTENDS.replace(
    "'<|im_start|>assistant\\n' + message.content",
    "'<|im_start|>assistant\\n' + (message.reasoning_content + '\\n[FINAL]\\n' if message.reasoning_content else '')"
    " + message.content",
).replace("assistant\\n' }}", "assistant\\nMy thoughts:\\n' }}")
LOSES_CALLS = EXTENDS.replace(CALLS, "")
NO_TOOLS = EXTENDS.replace(HEAD, "")
LOSES_RESULTS = EXTENDS.replace("<tool_response>' + message.content", "<tool_response>'")
LAST_RESULT = EXTENDS.replace(
    "<tool_response>' + message.content",
    "<tool_response>' + ('' if (loop.nextitem or {}).role == 'tool' else message.content)",
)


def with_parts(template: str) -> str:
    """The template for contents that are texts or lists of parts, images among them."""
    return SHOWN + template.replace("message.content", "shown(message.content)")


def shown(value: Any) -> str:
    """A value as the filter `tojson` of transformers writes it."""
    return json.dumps(value, ensure_ascii=False)


def text_of(answer: Answer) -> str:
    return "".join(part["text"] for part in answer["content"])


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    return [call["function"] for call in answer.get("tool_calls", ())]


def chat_calls(answer: Answer) -> str:
    calls = [f"<tool_call>\n{shown(call)}\n</tool_call>" for call in calls_of(answer)]
    return "\n".join(filter(None, [text_of(answer), *calls]))


def _extends(answer: Answer, thinking: bool | None) -> str:
    return chat_calls(answer) + "<|im_end|>"


def _strips(answer: Answer, thinking: bool | None) -> str:
    thought = f"<think>\n{answer.get('reasoning_content', '')}\n</think>\n\n"
    return ("" if thinking is False else thought) + chat_calls(answer) + "<|im_end|>"


def _opens(answer: Answer, thinking: bool | None) -> str:
    return f"{answer['reasoning_content']}\n</think>\n\n{chat_calls(answer)}<|im_end|>"


def _prefilled(answer: Answer, thinking: bool | None) -> str:
    thought = answer.get("reasoning_content")
    before = f"<|channel>thought\n{thought}\n<channel|>" if thought else ""
    calls = [f"<|tool_call>call:{call['name']}{shown(call['arguments'])}<tool_call|>" for call in calls_of(answer)]
    return before + text_of(answer) + "".join(calls) + ("<|tool_response>" if calls else "<turn|>")


def tagged_calls(answer: Answer) -> str:
    return "".join(f"<tool_call>{call['name']}{shown(call['arguments'])}</tool_call>" for call in calls_of(answer))


def _endless(answer: Answer, thinking: bool | None) -> str:
    return text_of(answer) + tagged_calls(answer)


def _rewrites(answer: Answer, thinking: bool | None) -> str:
    return (tagged_calls(answer) or text_of(answer)) + "<|im_end|>"


def _channels(answer: Answer, thinking: bool | None) -> str:
    thought = answer.get("reasoning_content")
    before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    for call in calls_of(answer):
        return f"{before} to={call['name']}<|message|>{shown(call['arguments'])}<|call|>"
    return f"{before}<|channel|>final<|message|>{text_of(answer)}<|return|>"


def _moves_tools(answer: Answer, thinking: bool | None) -> str:
    calls = [
        f"{call['function']['name']}{shown(call['function']['arguments'])}{call['id']}"
        for call in answer.get("tool_calls", ())
    ]
    return (f"[CALLS]{''.join(calls)}" if calls else text_of(answer)) + "<|im_end|>"


@frozen
class AgentTemplate:
    """A template, the tokens that end its answers, the key in which it takes thoughts, and what its target writes.

    special: further tokens of its markup.
    """

    text: str
    writes: Callable[[Answer, bool | None], str]
    eos: tuple[str, ...] = ("<|im_end|>",)
    key: str | None = None
    special: tuple[str, ...] = ()


TEMPLATES = {
    "extends": AgentTemplate(EXTENDS, _extends),
    "strips": AgentTemplate(STRIPS, _strips, key="reasoning_content"),
    "opens": AgentTemplate(OPENS, _opens, key="reasoning_content"),
    "prefilled": AgentTemplate(
        PREFILLED,
        _prefilled,
        eos=("<turn|>", "<|tool_response>"),
        key="thinking",
        special=("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|result>", "<result|>"),
    ),
    "endless": AgentTemplate(
        ENDLESS, _endless, eos=("<|user|>", "<|observation|>"), special=("<|system|>", "<|assistant|>")
    ),
    "rewrites": AgentTemplate(REWRITES, _rewrites),
    "channels": AgentTemplate(
        CHANNELS,
        _channels,
        eos=("<|return|>", "<|call|>"),
        key="thinking",
        special=("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
    ),
    "moves tools": AgentTemplate(
        MOVES_TOOLS,
        _moves_tools,
        special=("[INST]", "[/INST]", "[CALLS]", "[TOOLS]", "[/TOOLS]", "[RESULT]", "[/RESULT]"),
    ),
    "dated": AgentTemplate(DATED, _extends),
    "loses calls": AgentTemplate(LOSES_CALLS, _extends),
    "no tools": AgentTemplate(NO_TOOLS, _extends),
    "loses results": AgentTemplate(LOSES_RESULTS, _extends),
    "shows the last result": AgentTemplate(LAST_RESULT, _extends),
}
