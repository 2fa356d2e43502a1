"""Conversations with tools in the one form of rows, and encoders for the templates of agent_templates.py."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve
from tokenizers import AddedToken

from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.lib.vision.processor import Processor, load_processor
from ops.tokenize_chat.builtin import write_builtin_processor

NAME = "get_weather"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Looks at the sky.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TEXTS = 'Weather in Paris? Sunny, 20 degrees. I look. {"name": "get_weather"} Rome: rain.\n\n' * 20
PARTS_OF_TEXT = (THINK, END_OF_THOUGHT, "<tool_call>", "</tool_call>")  # tokens, as in Qwen's, but not special

Message = dict[str, Any]


def say(role: str, text: str = "", **more: Any) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}] if text else [], **more}


def calls(*cities: str, text: str = "", **more: Any) -> Message:
    """An answer that asks for the weather in each city; `conversation` sets the ids."""
    asked = [{"type": "function", "function": {"name": NAME, "arguments": {"city": city}}} for city in cities]
    return say("assistant", text, tool_calls=asked, **more)


def conversation(*messages: Message) -> list[Message]:
    """The messages, with an id for each call, and for each result the id of the first call that has none."""
    made: list[Message] = []
    number, waiting = 0, []
    for message in messages:
        message = copy.deepcopy(message)
        for place, call in enumerate(message.get("tool_calls", ())):
            number += 1
            message["tool_calls"][place] = {"id": f"call{number:05}", **call}
            waiting.append(f"call{number:05}")
        if message["role"] == "tool":
            message |= {"tool_call_id": waiting.pop(0), "name": NAME}
        made.append(message)
    return made


ASK, ASK_AGAIN = say("user", "Weather in Paris?"), say("user", "And in Rome?")
SUN, RAIN = say("tool", "result: clear sky"), say("tool", "result: wet")
SUNNY, RAINY = say("assistant", "Sunny."), say("assistant", "Rain, sadly.")
WHY, WHY_SUN, WHY_RAIN = "I must ask.", "It says clear.", "The rest is easy."


def why(message: Message, reasoning: str) -> Message:
    return {**message, "reasoning_content": reasoning}


SAMPLES = {
    "one call": conversation(ASK, calls("Paris"), SUN, SUNNY),
    "text and call": conversation(ASK, calls("Paris", text="I look."), SUN, SUNNY),
    "parallel": conversation(ASK, calls("Paris", "Rome"), SUN, RAIN, SUNNY),
    "two queries": conversation(ASK, calls("Paris"), SUN, SUNNY, ASK_AGAIN, calls("Rome"), RAIN, RAINY),
    "reasoning": conversation(ASK, why(calls("Paris"), WHY), SUN, why(SUNNY, WHY_SUN)),
    "reasoning, then a query": conversation(
        ASK, why(calls("Paris"), WHY), SUN, why(SUNNY, WHY_SUN), ASK_AGAIN, why(RAINY, WHY_RAIN)
    ),
    "ends with a call": conversation(ASK, calls("Paris")),
}


def write_agent_processor(folder: Path) -> Processor:
    """A text-only processor whose tokenizer knows the words of the samples."""
    write_builtin_processor(folder, [[say("user", TEXTS)]], vocab_size=420)
    return evolve(load_processor(str(folder)), image_processor=None)


def with_template(base: Processor, template: str, eos: Sequence[str], special: Iterable[str] = ()) -> Processor:
    """The processor with another chat template, whose markup is special tokens."""
    tokenizer = copy.deepcopy(base.tokenizer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PARTS_OF_TEXT])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*eos, *special)])
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = template
    ids = tokenizer.convert_tokens_to_ids(list(eos))
    marks = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return evolve(base, tokenizer=tokenizer, eos_token_ids=tuple(ids), special_tokens=marks)


PARAMETERS = {"type": "object", "properties": {}}
OTHER_ORDER = {
    "function": {"strict": True, "parameters": PARAMETERS, "name": "then", "description": "Tells a day."},
    "type": "function",
}
SHORT = {"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}
OTHER_KEYS = {
    "type": "function",
    "icon": "clock",
    "defer_loading": True,
    "function": {"name": "later", "returns": {"type": "string"}, "description": None, "strict": False},
}
# As clients may give them; engines rewrite some of them for the chat template.
TOOL_LISTS = {
    "one": TOOLS,
    "keys in another order": [OTHER_ORDER, *TOOLS],
    "without a description": [SHORT, *TOOLS],
    "other keys": [OTHER_KEYS, *TOOLS],
}
