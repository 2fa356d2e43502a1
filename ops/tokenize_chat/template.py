"""The chat template: messages into text, and the reasons for which a sample cannot be tokenised.

A template comes with a checkpoint and may render for ever, so it is rendered in a process with limits (rendering.py).
What a conversation needs rendered is a generator, a `Renderings`: many of them share each request to that process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from attrs import frozen

from dsl.errors import DataError, on_one_line, shortened
from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.lib.data.limited_process import SECONDS, Exhausted, limited
from ops.lib.data.sample_account import Unusable, shown_id
from ops.lib.vision.chat_template import check_thinking
from ops.lib.vision.processor import Processor
from ops.lib.vision.template_kinds import is_harmony
from ops.tokenize_chat.channels import for_channels
from ops.tokenize_chat.rendering import FAILED, TOO_MUCH_TEXT, render

T = TypeVar("T")

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]
Span = tuple[int, int]  # first character, and the one behind the last

SPECIAL_IN_TEXT = "special token in the text"
NO_TOKEN_BOUNDARY = "answer begins inside a token"
NO_ANSWER = "no answer"
OTHER_THOUGHT = "reasoning does not fit the generation prompt"

ANSWER_NOT_FOUND = "answer not found in the rendered text"
NOT_CLOSED = "no EOS token behind an answer"
ANSWER_CHANGED = "answer changed by the chat template"
OTHER_PLACEHOLDERS = "placeholders differ from the images"
NO_TOOLS = "the chat template shows no tools"
# Single samples may have these with a good template; with an unusable one, every sample has.
MISFITS = (FAILED, TOO_MUCH_TEXT, ANSWER_NOT_FOUND, NOT_CLOSED, ANSWER_CHANGED, OTHER_PLACEHOLDERS)

PROBE = "\ue000"  # of private use, so that no template has it
PROBED_QUESTION = {"role": "user", "content": [{"type": "text", "text": "Q"}]}
PROBED_TOOL = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@frozen
class Rendering:
    """A request to render messages. prompt: with the generation prompt after them. marked: with the spans of `Text`."""

    messages: Messages
    prompt: bool = False
    marked: bool = False


@frozen
class Text:
    """The text of a rendered conversation. spans: those that the template marks as generated, on request."""

    text: str
    spans: tuple[Span, ...] = ()


Renderings = Generator[Sequence[Rendering], Sequence[Text], T]
Request = tuple[Messages, dict[str, Any]]


def value_or_unusable(function: Callable[..., T], *arguments: Any) -> T | Unusable:
    """The result of a function call, or the Unusable that it raises."""
    try:
        return function(*arguments)
    except Unusable as error:
        return error


class Template:
    """The chat template of a processor; threads may share one.

    enable_thinking: passed to the template, None for its default. seconds: CPU time for all renderings of a sample
    together. has_marks: whether the template uses `{% generation %}`; has_channels: whether it is that of
    gpt-oss. Raises ConfigError for an enable_thinking that the template does not read.
    """

    def __init__(self, processor: Processor, enable_thinking: bool | None = None, seconds: float = SECONDS) -> None:
        self.source = processor.source
        self._text = processor.tokenizer.get_chat_template()
        check_thinking(enable_thinking, [self._text], self.source)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._arguments = {**processor.tokenizer.special_tokens_map, **thinking}
        self._strings_only = processor.image_processor is None and not processor.blind
        self._special_tokens = [token for token in processor.special_tokens if token not in (THINK, END_OF_THOUGHT)]
        self.has_marks = GENERATION.search(self._text) is not None
        self.has_channels = is_harmony(self._text)
        self._seconds = seconds
        self._process = limited(render, seconds)
        self._process.start()

    def wait_until_started(self) -> None:
        """Wait until the rendering process has imported its libraries, which takes seconds and is no work
        on a sample.
        """
        self._process.map([self._text, self._arguments], [[]])

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a prompt shows the tools. Raises as `finish`."""
        tools = [{"type": "function", "function": PROBED_TOOL}]
        return self._shows(Rendering([PROBED_QUESTION], prompt=True), tools)

    @cached_property
    def shows_reasoning(self) -> bool:
        """Whether an answer shows its `reasoning_content`. Raises as `finish`."""
        answer = {"role": "assistant", "content": [{"type": "text", "text": "A"}], "reasoning_content": PROBE}
        return self._shows(Rendering([PROBED_QUESTION, answer]), ())

    def _shows(self, rendering: Rendering, tools: Tools) -> bool:
        return PROBE in self.finish(_one_text(rendering), tools=tools)

    def check(self, messages: Messages, tools: Tools = ()) -> None:
        """Check that the template shows the tools, and that no text contains a special token, which would look like a
        part of the template. Raises Unusable.

        The texts of a message count as one: an image between two of them may have been moved away. Names and arguments
        of calls, and all of the tools, are texts too.
        """
        if tools and not self.shows_tools:
            raise Unusable(NO_TOOLS)
        texts = ["".join(texts_of(message)) for message in messages]
        texts += [message["reasoning_content"] for message in messages if "reasoning_content" in message]
        texts += strings_in([list(tools), *(message["tool_calls"] for message in messages if "tool_calls" in message)])
        everything = "\0".join(texts)
        for token in self._special_tokens:
            if token in everything:
                raise Unusable(SPECIAL_IN_TEXT, token)

    def render(self, messages: Messages, prompt: bool = False, sample_id: str | None = None, tools: Tools = ()) -> str:
        """The text of the messages. prompt: with the generation prompt after them. Raises as `finish` does."""
        return self.finish(_one_text(Rendering(messages, prompt)), sample_id, tools)

    def finish(self, renderings: Renderings[T], sample_id: str | None = None, tools: Tools = ()) -> T:
        """Run a generator to its result, rendering all that it requests with the tools.

        Raises Unusable if the template refuses the messages or fails on them, and DataError if it takes too long.
        """
        (result,) = self.finish_all([renderings], [sample_id], [tools])
        if isinstance(result, Unusable):
            raise result
        return result

    def finish_all(
        self,
        samples: Sequence[Renderings[T]],
        sample_ids: Sequence[str | None],
        tools: Sequence[Tools] | None = None,
    ) -> list[T | Unusable]:
        """Run several generators as `finish` does; each result may be the reason why a sample is unusable.

        tools: of each sample. Raises DataError if rendering takes too long.
        """
        of_each = tools or [()] * len(samples)
        results: dict[int, T | Unusable] = {}
        texts: dict[int, Sequence[Text] | None] = dict.fromkeys(range(len(samples)))  # to send to each generator
        left = [self._seconds] * len(samples)
        while texts:
            wanted: dict[int, Sequence[Rendering]] = {}
            for place, given in texts.items():
                try:
                    wanted[place] = next(samples[place]) if given is None else samples[place].send(given)
                except StopIteration as end:
                    results[place] = end.value
                except Unusable as error:
                    results[place] = error
            requests = [[self._request(one, of_each[place]) for one in wanted[place]] for place in wanted]
            names = [_named(sample_ids[place], wanted[place][0].messages) for place in wanted]
            rendered = self._render(requests, names, [left[place] for place in wanted])
            texts = {}
            for place, (found, left[place]) in zip(wanted, rendered, strict=True):
                if isinstance(found, Unusable):
                    results[place] = found
                else:
                    texts[place] = found
        return [results[place] for place in range(len(samples))]

    def _render(
        self, requests: Sequence[list[Request]], names: Sequence[str], seconds: Sequence[float]
    ) -> list[tuple[Sequence[Text] | Unusable, float]]:
        """The rendered texts for each sample, and the seconds left to it. names: of the samples, for the DataError."""
        try:
            replies = self._process.map([self._text, self._arguments], requests, seconds) if requests else []
        except Exhausted as error:
            raise DataError(
                f"{names[error.place]}: rendering the chat template of {self.source} {error}; fix the template, or "
                "remove the sample"
            ) from None
        return [(_texts(reply.result), reply.left) for reply in replies]

    def _request(self, rendering: Rendering, tools: Tools) -> Request:
        messages = for_channels(rendering.messages) if self.has_channels else rendering.messages
        if self._strings_only:
            messages = [{**message, "content": "".join(texts_of(message))} for message in messages]
        options: dict[str, Any] = {
            "add_generation_prompt": rendering.prompt,
            "return_assistant_tokens_mask": rendering.marked,
        }
        return messages, {**options, "tools": list(tools)} if tools else options


def _texts(result: dict[str, Any]) -> Sequence[Text] | Unusable:
    """The texts in a result of `render`, or its failure as Unusable."""
    if "texts" not in result:
        return Unusable(**result)
    return [Text(text, tuple(map(tuple, spans))) for text, spans in result["texts"]]


def _one_text(rendering: Rendering) -> Renderings[str]:
    (shown,) = yield [rendering]
    return shown.text


def _named(sample_id: str | None, messages: Messages) -> str:
    if sample_id is not None:
        return f'sample "{shown_id(sample_id)}"'
    first = next((text for message in messages for text in texts_of(message)), "")
    return f'the conversation that begins with "{shortened(on_one_line(first))}"'


def strings_in(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value


def texts_of(message: dict[str, Any]) -> list[str]:
    return [part["text"] for part in message["content"] if part["type"] == "text"]


def answer_words(message: dict[str, Any]) -> list[str]:
    """The parts of an answer's text, without its thought and without blanks around it."""
    return [text.rpartition(END_OF_THOUGHT)[2].strip() for text in texts_of(message)]


THOUGHT_TAGS = re.compile(f"{THINK}|{END_OF_THOUGHT}")


def check_shown(answer: dict[str, Any], text: str, shows_reasoning: bool) -> None:
    """Check that the text of an answer shows all of it: its words, reasoning, and the calls' names and strings.

    Strings of arguments may be as they are, or as in JSON. Raises Unusable.
    """

    def refuse(what: str) -> Unusable:
        return Unusable(ANSWER_CHANGED, f"{what} is not shown in {shortened(on_one_line(text))!r}")

    if not all(words.strip() in text for part in texts_of(answer) for words in THOUGHT_TAGS.split(part)):
        raise refuse("the text")
    if shows_reasoning and answer.get("reasoning_content", "").strip() not in text:
        raise refuse("the reasoning")
    for call in answer.get("tool_calls", ()):
        function = call["function"]
        strings = [function["name"], *strings_in(list(function["arguments"].values()))]
        if not all(each in text or json.dumps(each, ensure_ascii=False)[1:-1] in text for each in strings):
            raise refuse(f"the call {function['name']}")


def thinks(message: dict[str, Any]) -> bool:
    """Whether an answer has reasoning, in its own key or in a block of its text."""
    return bool(message.get("reasoning_content")) or END_OF_THOUGHT in "".join(texts_of(message))
