"""The prompts that dflow makes by published chat templates, and the requests that ask an engine for the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_rows import SAMPLES, TOOLS
from attrs import frozen
from published_templates import published_templates
from transformers import AutoTokenizer

from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import load_processor
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


def set_template(checkpoint: Path, template: str) -> Any:
    """Give a checkpoint another chat template; its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(checkpoint)
    return tokenizer


def prompts_of(checkpoint: Path, thinking: bool | None, tools_as: str) -> Iterator[Asked]:
    """The prompts before each answer of the samples with tools, without those that the template refuses."""
    prompts = Prompts(ChatEncoder(load_processor(str(checkpoint)), thinking, tools_as=tools_as), Path())
    for messages in SAMPLES.values():
        for turn in [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]:
            try:
                ids, _ = prompts.ids({"id": "a", "images": [], "messages": messages[:turn], "tools": TOOLS})
            except Unusable:
                continue
            yield Asked(ids, wire_messages(prompts.shown(messages[:turn]), []))
