"""The chat template: messages into text, and the reasons for which a sample cannot be tokenised.

A template comes with a checkpoint and may render for ever, so it is rendered in a process with limits (rendering.py).
What a conversation needs rendered is a generator, a `Renderings`: many of them share each request to that process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from attrs import frozen

from dsl.errors import DataError, on_one_line, shortened
from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.lib.data.limited_process import SECONDS, Exhausted, limited
from ops.lib.data.sample_account import Unusable, shown_id
from ops.lib.data.tool_forms import GIVEN, ToolsAs, tools_in_form
from ops.lib.vision.chat_template import check_thinking
from ops.lib.vision.processor import Processor
from ops.lib.vision.template_kinds import is_harmony
from ops.tokenize_chat.channels import for_channels
from ops.tokenize_chat.rendering import FAILED, TOO_MUCH_TEXT, render

T = TypeVar("T")

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]
Documents = Sequence[dict[str, Any]]
Span = tuple[int, int]  # first character, and the one behind the last

SPECIAL_IN_TEXT = "special token in the text"
NO_TOKEN_BOUNDARY = "answer begins inside a token"
NO_ANSWER = "no answer"
OTHER_THOUGHT = "reasoning does not fit the generation prompt"

ANSWER_NOT_FOUND = "answer not found in the rendered text"
NOT_CLOSED = "no EOS token behind an answer"
ANSWER_CHANGED = "answer changed by the chat template"
OTHER_PLACEHOLDERS = "placeholders differ from the images"
TOOLS_NOT_SHOWN = "tools not shown by the chat template"
RESULTS_NOT_SHOWN = "tool results not shown by the chat template"
DOCUMENTS_NOT_SHOWN = "documents not shown by the chat template"
IMAGES_NOT_SHOWN = "images of tool results not shown by the chat template"
OTHER_ORDER = "images of tool results in another order than their calls"
OTHER_IDS = "generated ids that the model does not have"
# Single samples may have these with a good template; with an unusable one, every sample has.
MISFITS = (FAILED, TOO_MUCH_TEXT, ANSWER_NOT_FOUND, NOT_CLOSED, ANSWER_CHANGED, OTHER_PLACEHOLDERS)

OF_GENERATED = ("generated_ids", "tokenizer")  # of an answer that its target generated: no template reads them

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@frozen
class Rendering:
    """A request to render messages. prompt: with the generation prompt after them. marked: with the spans of `Text`.

    tools: those that the assistant may call; the same in all requests at once. may_fail: whether a failure gives the
    text that is `absent`, instead of dropping the sample.
    """

    messages: Messages
    prompt: bool = False
    marked: bool = False
    tools: Tools = ()
    may_fail: bool = False


@frozen
class Text:
    """The text of a rendered conversation. spans: those that the template marks as generated, on request.

    absent: whether the rendering failed, which was allowed; then the text is empty.
    """

    text: str
    spans: tuple[Span, ...] = ()
    absent: bool = False


Renderings = Generator[Sequence[Rendering], Sequence[Text], T]


def value_or_unusable(function: Callable[..., T], *arguments: Any) -> T | Unusable:
    """The result of a function call, or the Unusable that it raises."""
    try:
        return function(*arguments)
    except Unusable as error:
        return error


class Template:
    """The chat template of a processor; threads may share one.

    enable_thinking: passed to the template, None for its default. seconds: CPU time for all renderings of a sample
    together. tools_as: the form in which it gets tools. has_marks: whether the template uses `{% generation %}`;
    has_channels: whether it is that of gpt-oss; thinks: whether it has the end of a thought.
    Raises ConfigError for an enable_thinking that the template does not read.
    """

    def __init__(
        self,
        processor: Processor,
        enable_thinking: bool | None = None,
        seconds: float = SECONDS,
        tools_as: ToolsAs = GIVEN,
    ) -> None:
        self.source = processor.source
        self._text = processor.tokenizer.get_chat_template()
        check_thinking(enable_thinking, [self._text], self.source)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._arguments = {**processor.tokenizer.special_tokens_map, **thinking}
        self.thinks = END_OF_THOUGHT in self._text
        self._strings_only = processor.image_processor is None and not processor.blind
        self.special_tokens = [token for token in processor.special_tokens if token not in (THINK, END_OF_THOUGHT)]
        self.has_marks = GENERATION.search(self._text) is not None
        self.has_channels = is_harmony(self._text)
        self._seconds = seconds
        self._tools_as = tools_as
        self._process = limited(render, seconds)
        self._process.start()

    def wait_until_started(self) -> None:
        """Wait until the rendering process has imported its libraries, which takes seconds and is no work
        on a sample.
        """
        self._process.map([self._text, self._arguments], [_item([])])

    def check(self, messages: Messages, tools: Tools = (), documents: Documents = ()) -> None:
        """Check that no text contains a special token, which would look like a part of the template. Raises Unusable.

        Texts are also those of reasoning, of calls, of tools and of documents. The texts of a message count as one: an
        image between two of them may have been moved away.
        """
        texts = ["".join(texts_of(message)) for message in messages]
        texts += [message["reasoning_content"] for message in messages if "reasoning_content" in message]
        texts += strings_in([message.get("tool_calls", ()) for message in messages])
        texts += strings_in([tools_in_form(self._tools_as, tools), documents])
        everything = "\0".join(texts)
        for token in self.special_tokens:
            if token in everything:
                raise Unusable(SPECIAL_IN_TEXT, token)

    def render(
        self,
        messages: Messages,
        prompt: bool = False,
        sample_id: str | None = None,
        tools: Tools = (),
        documents: Documents = (),
    ) -> str:
        """The text of the messages. prompt: with the generation prompt after them. Raises as `finish` does."""
        return self.finish(_one_text(Rendering(messages, prompt, tools=tools)), sample_id, documents)

    def finish(self, renderings: Renderings[T], sample_id: str | None = None, documents: Documents = ()) -> T:
        """Run a generator to its result, rendering all that it requests with the documents.

        Raises Unusable if the template refuses the messages or fails on them, and DataError if it takes too long.
        """
        (result,) = self.finish_all([renderings], [sample_id], [documents])
        if isinstance(result, Unusable):
            raise result
        return result

    def finish_all(
        self,
        samples: Sequence[Renderings[T]],
        sample_ids: Sequence[str | None],
        documents: Sequence[Documents] | None = None,
    ) -> list[T | Unusable]:
        """Run several generators as `finish` does; each result may be the reason why a sample is unusable.

        documents: of each.

        Raises DataError if rendering takes too long.
        """
        documents = documents or [()] * len(samples)
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
            rendered = self._render(
                list(wanted.values()),
                [sample_ids[place] for place in wanted],
                [documents[place] for place in wanted],
                [left[place] for place in wanted],
            )
            texts = {}
            for place, (found, left[place]) in zip(wanted, rendered, strict=True):
                if isinstance(found, Unusable):
                    results[place] = found
                else:
                    texts[place] = found
        return [results[place] for place in range(len(samples))]

    def _render(
        self,
        samples: Sequence[Sequence[Rendering]],
        sample_ids: Sequence[str | None],
        documents: Sequence[Documents],
        seconds: Sequence[float],
    ) -> list[tuple[Sequence[Text] | Unusable, float]]:
        """The rendered texts for each sample, and the seconds left to it."""
        pairs = zip(samples, documents, strict=True)
        items = [_item(renderings, self._shown, self._tools_as, own) for renderings, own in pairs]
        try:
            replies = self._process.map([self._text, self._arguments], items, seconds) if items else []
        except Exhausted as error:
            named = _named(sample_ids[error.place], samples[error.place][0].messages)
            raise DataError(
                f"{named}: rendering the chat template of {self.source} {error}; raise render_seconds, "
                "fix the template, or remove the sample"
            ) from None
        return [(_texts(reply.result), reply.left) for reply in replies]

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template takes it."""
        message = {key: value for key, value in message.items() if key not in OF_GENERATED}
        if self.has_channels:
            (message,) = for_channels([message])
        is_text = all(part["type"] == "text" for part in message["content"])
        if self._strings_only or (is_text and (message["role"] == "tool" or "tool_calls" in message)):
            return {**message, "content": "".join(texts_of(message))}
        return message


def _item(
    renderings: Sequence[Rendering],
    shown: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    tools_as: ToolsAs = GIVEN,
    documents: Documents = (),
) -> dict[str, Any]:
    """The requests of a sample for `render`; a message of several of them is sent once."""
    places: dict[int, int] = {}
    messages: list[dict[str, Any]] = []
    wanted = []
    for rendering in renderings:
        for message in rendering.messages:
            if id(message) not in places:
                places[id(message)] = len(messages)
                messages.append(shown(message) if shown else message)
        options = {"add_generation_prompt": rendering.prompt, "return_assistant_tokens_mask": rendering.marked}
        wanted.append([[places[id(message)] for message in rendering.messages], options, rendering.may_fail])
    tools = renderings[0].tools if renderings else ()
    return {
        "messages": messages,
        "tools": tools_in_form(tools_as, tools) or None,
        "documents": list(documents) or None,
        "renderings": wanted,
    }


def _texts(result: dict[str, Any]) -> Sequence[Text] | Unusable:
    """The texts in a result of `render`, or its failure as Unusable."""
    if "texts" not in result:
        return Unusable(**result)
    texts: list[Text] = []
    before = ""
    for one in result["texts"]:
        if one is None:
            texts.append(Text("", absent=True))
            continue
        agreement, rest, spans = one
        before = before[:agreement] + rest
        texts.append(Text(before, tuple(map(tuple, spans))))
    return texts


def _one_text(rendering: Rendering) -> Renderings[str]:
    (shown,) = yield [rendering]
    return shown.text


def _named(sample_id: str | None, messages: Messages) -> str:
    if sample_id is not None:
        return f'sample "{shown_id(sample_id)}"'
    first = next((text for message in messages for text in texts_of(message)), "")
    return f'the conversation that begins with "{shortened(on_one_line(first))}"'


def texts_of(message: dict[str, Any]) -> list[str]:
    return [part["text"] for part in message["content"] if part["type"] == "text"]


def strings_in(value: Any, with_keys: bool = True) -> Iterator[str]:
    """All texts in a value of JSON, which may be nested deeply; keys too, unless with_keys is false."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*(value if with_keys else ()), *value.values()]
        elif isinstance(value, list | tuple):
            values += value


def answer_words(message: dict[str, Any]) -> list[str]:
    """The parts of an answer's text, without its thought and without blanks around it."""
    return [text.rpartition(END_OF_THOUGHT)[2].strip() for text in texts_of(message)]


def thinks(message: dict[str, Any]) -> bool:
    """Whether an answer has reasoning, in its own key or in a block of its text."""
    return bool(message.get("reasoning_content")) or END_OF_THOUGHT in "".join(texts_of(message))
