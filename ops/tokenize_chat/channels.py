"""Answers of gpt-oss, which writes channels between special tokens: its reasoning (analysis) and the answer (final).

In samples they are as those of any thinking target: a thought between <think> and </think>, and the answer. Its chat
template takes the thought as a message's `thinking`, and writes the channels of the last answer again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ops.ingest.sample import END_OF_THOUGHT, THINK

ANSWER = re.compile(
    r"(?:<\|channel\|>analysis<\|message\|>(?P<thought>.*?)<\|end\|><\|start\|>assistant)?"
    r"<\|channel\|>final<\|message\|>(?P<words>.*)",
    re.DOTALL,
)


def without_channels(text: str) -> str:
    """A generated answer with its analysis as a thought; unchanged with any other channel, or without the final one."""
    found = ANSWER.fullmatch(text)
    if found is None:
        return text
    thought = found["thought"]
    return found["words"] if thought is None else f"{THINK}{thought}{END_OF_THOUGHT}{found['words']}"


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
    return {**message, "content": [{"type": "text", "text": text}], "thinking": thought}
