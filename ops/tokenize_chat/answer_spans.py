"""Positions of the answers in the text of a rendered conversation, in characters.

With `{% generation %}` marks, the template marks them. Without them, an answer follows its generation prompt:

    last answer      the text of the conversation begins with that of the messages before the answer and the
                     generation prompt, as a server would give it to the target
    earlier answers  cannot be found like this: a thinking template shows them without the thought, so the text does
                     not begin with the messages before them and a generation prompt that opens a thought.
                     The conversation is rendered a second time with a mark at the end of the text before each answer
                     and one where its words begin. Between the two are the end of a turn and the header of
                     an answer. That is compared with the same stretch before the last answer, which is known: the
                     answer begins after their common part. So a thought that the template keeps belongs to the
                     answer, and a stripped one is not expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.lib.data.sample_account import Unusable
from ops.tokenize_chat.template import (
    ANSWER_NOT_FOUND,
    OTHER_THOUGHT,
    Messages,
    Rendering,
    Renderings,
    Span,
    Tools,
    texts_of,
    thinks,
)


@frozen
class Rendered:
    """A rendered conversation that ends with an answer.

    prompt_end      number of characters up to the end of the last answer's generation prompt
    answers         start of every learnt answer, and its end if the template marks it
    """

    text: str
    prompt_end: int
    answers: tuple[tuple[int, int | None], ...]

    @property
    def tokenized(self) -> str:
        """The part of the text that is tokenised."""
        return self.text


def render_answers(has_marks: bool, messages: Messages, last_only: bool, tools: Tools = ()) -> Renderings[Rendered]:
    """Render messages whose last one is an answer, and find the answers in the text.

    has_marks: whether the template marks answers. tools: those that the assistant may call.
    Raises Unusable for a sample that does not fit the template.
    """
    whole, prompt = yield [
        Rendering(messages, marked=has_marks, tools=tools),
        Rendering(messages[:-1], prompt=True, tools=tools),
    ]
    text, end = whole.text, len(prompt.text)
    if not text.startswith(prompt.text):
        raise _not_prompted(messages[-1], prompt.text, text)
    if has_marks:
        return Rendered(text, end, _marked(text, whole.spans, end, last_only))
    earlier: list[int] = []
    if not last_only:
        earlier = yield from _earlier(messages, tools, text, end)
    return Rendered(text, end, (*((start, None) for start in earlier), (end, None)))


def _marked(text: str, spans: Sequence[Span], prompt_end: int, last_only: bool) -> tuple[tuple[int, int | None], ...]:
    """The spans that the template marks as answers; they start after the generation prompt.

    So the last answer begins after its own prompt even if the mark is earlier. Earlier answers skip the same text after
    their mark.
    """
    joined: list[Span] = []
    first = next((start for start, end in spans if end > prompt_end), prompt_end)
    prompted = text[first:prompt_end]
    for start, end in spans:
        start = max(start, prompt_end) if end > prompt_end else _after_prompted(prompted, text, start, end)
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    if not joined or joined[-1][1] <= prompt_end:
        raise Unusable(ANSWER_NOT_FOUND, "the template marks nothing of the last answer with {% generation %}")
    return tuple(span for span in joined if span[1] > prompt_end or not last_only)


def _after_prompted(prompted: str, text: str, start: int, end: int) -> int:
    """The position where an earlier answer, marked from `start` to `end`, begins after its prompted part.

    Raises Unusable for one with another thought than the prompt.
    """
    answer = text[start:end]
    if answer.startswith(prompted):
        return start + len(prompted)
    if THINK in prompted and answer.startswith(THINK) and END_OF_THOUGHT in answer:
        raise Unusable(OTHER_THOUGHT, f"an earlier answer shows {answer[:30]!r}, but {prompted!r} is prompted")
    return start


def _not_prompted(answer: dict[str, Any], prompt: str, text: str) -> Unusable:
    """The error for an answer that cannot be found, as the text does not begin with its prompt."""
    if thinks(answer):
        return Unusable(OTHER_THOUGHT, f"the prompt ends with {prompt[-30:]!r}; check enable_thinking")
    place = next((place for place, pair in enumerate(zip(prompt, text, strict=False)) if pair[0] != pair[1]), len(text))
    return Unusable(
        ANSWER_NOT_FOUND,
        f"the text has {text[place : place + 30]!r}, but the prompt {prompt[place : place + 30]!r}",
    )


@frozen
class Stretch:
    """The text between an answer's words and those of the message before it.

    start: its first character. shown: the end of a turn, the answer's header, and its thought if that is shown.
    """

    start: int
    shown: str


def _earlier(messages: Messages, tools: Tools, text: str, prompt_end: int) -> Renderings[list[int]]:
    """The positions where the answers before the last one begin."""
    turns = [turn for turn, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
    if not turns:
        return []
    stretches = yield from _stretches(messages, tools, turns, text, prompt_end)
    starts = []
    for turn in turns:
        start = None
        if stretches:
            answer = "".join(texts_of(messages[turn]))
            start = _after_header(stretches[-1].shown, text, stretches[turn], answer)
        if start is None:
            start = yield from _end_of_prompt(messages, tools, turn, text)
        starts.append(start)
    return starts


def _end_of_prompt(messages: Messages, tools: Tools, turn: int, text: str) -> Renderings[int]:
    """The position in `text` where the generation prompt of a turn's answer ends.

    `text` must begin with everything up to it.
    """
    (prompt,) = yield [Rendering(messages[:turn], prompt=True, tools=tools)]
    if not text.startswith(prompt.text):
        raise _not_prompted(messages[turn], prompt.text, text)
    return len(prompt.text)


def _after_header(header: str, text: str, stretch: Stretch, answer: str) -> int | None:
    """The position in `text` where the answer after a stretch begins; None if that is unclear.

    header: the stretch before the last answer, up to the end of its generation prompt. If an answer's own words repeat
    the rest of the header, it begins after them; an example is the "<think>" of an unclosed thought that the prompt
    opens too.
    """
    # Blanks at the end of the previous message are in the stretch as well, unless the template strips them.
    header, bare = header.lstrip(), stretch.shown.lstrip()
    start = stretch.start + len(stretch.shown) - len(bare)
    if text.startswith(header, start):
        return start + len(header)
    words = answer.rpartition(END_OF_THOUGHT)[2]
    blanks = words[: len(words) - len(words.lstrip())]  # so may be those at the start of the answer, or some of them
    # A text has at most some thousands of ends that leave no more than the header, even with millions of blanks.
    removed = range(max(0, len(bare) - len(header)), min(len(blanks), len(bare)) + 1)
    parts = (bare.removesuffix(blanks[len(blanks) - length :]) for length in removed)
    # With a part of a prompted thought, the answer has another thought than the prompt.
    return next((start + len(part) for part in parts if header.startswith(part) and THINK not in part), None)


def _stretches(
    messages: Messages, tools: Tools, turns: list[int], text: str, prompt_end: int
) -> Renderings[dict[int, Stretch]]:
    """The stretch before the answer of each turn; under -1 that of the last answer, up to the end of its prompt.

    Empty if the template does more with a mark character than show it.
    """
    used = {character for message in messages for part in texts_of(message) for character in part}
    mark = next((character for character in map(chr, range(0xF0000, 0xFFFFE)) if character not in used), None)
    if mark is None:
        return {}
    marked = list(messages)
    for turn in turns:
        marked[turn] = _mark_words(marked[turn], mark)
    for turn in (*turns, len(messages) - 1):
        if turn:
            marked[turn - 1] = _mark_end(marked[turn - 1], mark)
    (shown,) = yield [Rendering(marked, tools=tools)]
    pieces = shown.text.split(mark)
    if "".join(pieces) != text or len(pieces) != 2 + sum(2 if turn else 1 for turn in turns):
        return {}
    upcoming, start, stretches = iter(pieces), 0, {}
    for turn in turns:
        start += len(next(upcoming)) if turn else 0
        stretches[turn] = Stretch(start, next(upcoming))
        start += len(stretches[turn].shown)
    start += len(next(upcoming))
    return {**stretches, -1: Stretch(start, text[start:prompt_end])}


def _mark_words(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark where its words begin, after thought and blanks, which a template may strip."""
    parts = list(message["content"])
    if not parts or parts[0]["type"] != "text":
        return {**message, "content": [{"type": "text", "text": mark}, *parts]}
    text = parts[0]["text"]
    words = text.rfind(END_OF_THOUGHT) + len(END_OF_THOUGHT) if END_OF_THOUGHT in text else 0
    if text[words:].strip():  # a mark after only blanks would keep the template from stripping them
        words = len(text) - len(text[words:].lstrip())
    return {**message, "content": [{"type": "text", "text": text[:words] + mark + text[words:]}, *parts[1:]]}


def _mark_end(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark after its last word."""
    parts = list(message["content"])
    if not parts or parts[-1]["type"] != "text":
        return {**message, "content": [*parts, {"type": "text", "text": mark}]}
    text = parts[-1]["text"]
    end = len(text.rstrip())
    return {**message, "content": [*parts[:-1], {"type": "text", "text": text[:end] + mark + text[end:]}]}
