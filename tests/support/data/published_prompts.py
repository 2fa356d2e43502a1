"""The prompts that dflow makes by published chat templates, and the requests that ask an engine for the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_rows import SAMPLES, TOOLS
from attrs import frozen
from published_templates import published_templates
from transformers import AutoTokenizer

from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import load_processor
from ops.lib.vision.template_kinds import pinned
from ops.regenerate_answers.client import wire_messages
from ops.regenerate_answers.conversations import Prompts
from ops.tokenize_chat.encode import ChatEncoder

TEMPLATES = published_templates()
SETTINGS = [  # (template, enable_thinking)
    (name, thinking)
    for name, text in TEMPLATES.items()
    for thinking in ((True, False) if "enable_thinking" in text else (None,))
]


@frozen
class Asked:
    """A prompt: its ids, and the messages that ask for it."""

    ids: list[int]
    messages: list[dict[str, Any]]


def set_template(checkpoint: Path, name: str) -> Any:
    """Give a checkpoint a published chat template, without the day on which it is rendered; its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = pinned(TEMPLATES[name])
    tokenizer.save_pretrained(checkpoint)
    return tokenizer


@frozen
class OfDflow:
    """What dflow asks before each answer of the samples with tools, without what the template refuses.

    reasoning_key: that from which the template takes the reasoning of earlier answers.
    """

    asked: list[Asked]
    reasoning_key: str | None


def of_dflow(checkpoint: Path, thinking: bool | None, tools_as: str) -> OfDflow:
    encoder, asked = ChatEncoder(load_processor(str(checkpoint)), thinking, tools_as=tools_as), []
    prompts = Prompts(encoder, Path())
    for messages in SAMPLES.values():
        for turn in [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]:
            try:
                ids, _ = prompts.ids({"id": "a", "images": [], "messages": messages[:turn], "tools": TOOLS})
            except Unusable:
                continue
            asked.append(Asked(ids, wire_messages(prompts.shown(messages[:turn]), [])))
    return OfDflow(asked, encoder.reasoning_key)
