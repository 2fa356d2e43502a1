"""Answers of gpt-oss, which writes channels between special tokens: its reasoning (analysis), the answer (final), and
a call of a tool (commentary), with the text before it.

In samples they are as those of any thinking target: a thought between <think> and </think>, and the answer. Its chat
template takes the thought as a message's `thinking`, and writes the channels of the last answer again.

Source: OpenAI's harmony response format, in which a call's recipient stands before its channel or behind it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ops.ingest.sample import END_OF_THOUGHT, THINK

THINKING = "thinking"  # the key of an analysis
CALL = (
    r"(?:<\|channel\|>commentary)? to=(?P<recipient>[^\s<]+)(?:<\|channel\|>commentary)?"
    r"(?: ?(?:<\|constrain\|>)?json)?<\|message\|>(?P<arguments>.*)"
)
ANSWER = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<thought>.*?)<\|end\|><\|start\|>assistant)?"
    rf"(?:<\|channel\|>final<\|message\|>(?P<words>.*)|"
    rf"(?:<\|channel\|>commentary<\|message\|>(?P<before>.*?)<\|end\|><\|start\|>assistant)?(?P<call>{CALL}))",
    re.DOTALL,
)
LAST_CALL = re.compile(CALL, re.DOTALL)


def without_channels(text: str) -> str:
    """A generated answer with its analysis as a thought, and a call as it is at its end; unchanged with any other
    channel, or without the final one and a call.
    """
    found = ANSWER.fullmatch(text)
    if found is None:
        return text
    thought = "" if found["thought"] is None else f"{THINK}{found['thought']}{END_OF_THOUGHT}"
    return thought + (found["words"] if found["call"] is None else (found["before"] or "") + found["call"])


def split_call(text: str) -> tuple[str, str, str]:
    """The text before the call of an answer `without_channels`, and the call's function and arguments as they are
    written; the whole text and twice "" without a call.
    """
    found = LAST_CALL.search(text)
    if found is None:
        return text, "", ""
    return text[: found.start()], found["recipient"].removeprefix("functions."), found["arguments"]


def for_channels(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the thoughts of answers as `thinking`, in which the chat template of gpt-oss reads them."""
    return [_for_channels(message) if message["role"] == "assistant" else message for message in messages]


def _for_channels(message: dict[str, Any]) -> dict[str, Any]:
    text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
    thought = message.get("reasoning_content")
    if END_OF_THOUGHT in text:
        thought, _, text = text.rpartition(END_OF_THOUGHT)
        thought, text = thought.removeprefix(THINK).strip("\n"), text.lstrip("\n")
    if thought is None:
        return message
    return {**message, "content": [{"type": "text", "text": text}], THINKING: thought}
