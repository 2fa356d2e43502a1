"""The chat template: messages into text, and the reasons for which a sample cannot be tokenised."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from dsl.errors import ConfigError
from ops.lib.data.sample_account import Unusable
from ops.lib.vision.processor import Processor

T = TypeVar("T")

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]  # first character, and the one behind the last

SPECIAL_IN_TEXT = "special token in the text"
NO_TOKEN_BOUNDARY = "answer begins inside a token"
REFUSED_BY_TEMPLATE = "refused by the chat template"
NO_ANSWER = "no answer"
OTHER_THOUGHT = "reasoning does not fit the generation prompt"

FAILED = "chat template fails on the messages"
ANSWER_NOT_FOUND = "answer not found in the rendered text"
NOT_CLOSED = "no EOS token behind an answer"
ANSWER_CHANGED = "answer changed by the chat template"
OTHER_PLACEHOLDERS = "placeholders differ from the images"
# Single samples may have these with a good template; with an unusable one, every sample has.
MISFITS = (FAILED, ANSWER_NOT_FOUND, NOT_CLOSED, ANSWER_CHANGED, OTHER_PLACEHOLDERS)

THINK, END_OF_THOUGHT = "<think>", "</think>"  # special tokens of a few tokenizers, but part of the text
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def value_or_unusable(function: Callable[..., T], *arguments: Any) -> T | Unusable:
    """What the function returns, or the Unusable that it raises."""
    try:
        return function(*arguments)
    except Unusable as error:
        return error


class Template:
    """The chat template of a processor, which threads may share.

    enable_thinking: passed to the template, None for its default. has_marks: `{% generation %}` is used.
    Raises ConfigError for an enable_thinking that the template does not read.
    """

    def __init__(self, processor: Processor, enable_thinking: bool | None = None) -> None:
        self.source = processor.source
        self._text = processor.tokenizer.get_chat_template()
        if enable_thinking is not None and "enable_thinking" not in self._text:
            raise ConfigError(f"the chat template of {self.source} does not read enable_thinking: remove it")
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._arguments = {**processor.tokenizer.special_tokens_map, **thinking}
        self._strings_only = processor.image_processor is None
        self._special_tokens = [token for token in processor.special_tokens if token not in (THINK, END_OF_THOUGHT)]
        self.has_marks = GENERATION.search(self._text) is not None
        # transformers keeps the marks of the current rendering in the compiled template, which is shared.
        self._turn: AbstractContextManager[Any] = Lock() if self.has_marks else nullcontext()

    def check(self, messages: Messages) -> None:
        """Raises Unusable if a text contains a special token, which would look like a part of the template.

        The texts of a message count as one: an image between two of them may have been moved away.
        """
        texts = ["".join(texts_of(message)) for message in messages]
        texts += [message["reasoning_content"] for message in messages if "reasoning_content" in message]
        everything = "\0".join(texts)
        for token in self._special_tokens:
            if token in everything:
                raise Unusable(SPECIAL_IN_TEXT, token)

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """The text of the messages; prompt: with the generation prompt after them.

        Raises Unusable if the template refuses the messages, or fails on them.
        """
        return self._render(messages, add_generation_prompt=prompt)[0]

    def render_marked(self, messages: Messages) -> tuple[str, list[Span]]:
        """The text, and the spans that the template marks as generated. Raises as `render`."""
        return self._render(messages, return_assistant_tokens_mask=True)

    def _render(self, messages: Messages, **options: bool) -> tuple[str, list[Span]]:
        if self._strings_only:
            messages = [{**message, "content": "".join(texts_of(message))} for message in messages]
        try:
            with self._turn:
                texts, spans = render_jinja_template(
                    conversations=[messages], chat_template=self._text, **options, **self._arguments
                )
        except TemplateError as error:  # e.g. a template without a system role, or one that requires alternating roles
            raise Unusable(REFUSED_BY_TEMPLATE, str(error)) from error
        except TypeError as error:  # e.g. one that expects texts instead of lists of parts
            raise Unusable(FAILED, str(error)) from error
        return texts[0], spans[0] if spans else []


def texts_of(message: dict[str, Any]) -> list[str]:
    return [part["text"] for part in message["content"] if part["type"] == "text"]


def answer_words(message: dict[str, Any]) -> list[str]:
    """The answer's text, part by part: without its thought, and without blanks around it."""
    return [text.rpartition(END_OF_THOUGHT)[2].strip() for text in texts_of(message)]


def thinks(message: dict[str, Any]) -> bool:
    """Whether the answer has reasoning, in its own key or in a block of its text."""
    return bool(message.get("reasoning_content")) or END_OF_THOUGHT in "".join(texts_of(message))
