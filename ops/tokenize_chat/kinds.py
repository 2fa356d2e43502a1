"""The kind of each token of an answer, as the target writes it: reasoning, text, call, or the EOS that ends it.

A template is probed for the texts with which a thought begins and ends, and a call begins (habits.py). An answer is
reasoning up to the end of its thought, and a call from the first opening of one on. The same texts apply to answers of
the data and to what a target generates.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence

import numpy as np
from attrs import frozen

from ops.lib.data.token_shards import KINDS
from ops.tokenize_chat.rendering import agreement

TAG = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
NEAR = 64  # tokens of the end of a prompt
REASONING, TEXT, CALL, END = map(KINDS.index, ("reasoning", "text", "call", "end"))


@frozen
class Opening:
    """How a call begins.

    text          its first characters
    unless        what stands behind them where they begin a text instead, as the recipient "user"; "" if they never do
    comes_first   whether a call is one only as the first characters of an answer, or behind its thought
    closing       the end of the last call, where texts stand behind calls; "" where they stand before them
    """

    text: str
    unless: str = ""
    comes_first: bool = False
    closing: str = ""

    def find(self, answer: str, start: int = 0) -> int:
        """The place of the first call from a place on, -1 without one."""
        place = answer.find(self.text, start)
        while place >= 0 and self.unless and answer.startswith(self.unless, place + len(self.text)):
            place = answer.find(self.text, place + 1)
        return place


@frozen
class Markup:
    """The texts around the parts of an answer.

    openings, closings    of a thought
    call                  how calls begin; None if the template shows none
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    call: Opening | None

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the opening of a thought, so that its answer begins inside it."""
        return prompt.rstrip().endswith(self.openings)

    def parts(self, answer: str, is_open: bool) -> tuple[int, int]:
        """The end of an answer's thought, 0 without one, and the start of its calls, its length without any.

        is_open: whether its prompt has opened the thought.
        """
        thought = self._end_of_thought(answer, is_open)
        call = -1 if self.call is None else self.call.find(answer, thought)
        if self.call is not None and self.call.comes_first and answer[thought : max(call, thought)].strip():
            call = -1
        return thought, call if call >= 0 else len(answer)

    def end_of_calls(self, answer: str, start: int) -> int:
        """The end of the calls that start at a place of an answer: that of the answer, or of the last closing."""
        closing = "" if self.call is None else self.call.closing
        place = answer.rfind(closing, start) if closing else -1
        return place + len(closing) if place >= 0 else len(answer)

    def apart(self, answer: str, is_open: bool) -> tuple[str, str]:
        """The thought of an answer, without the texts around it, and the rest; without a whole thought "" and all."""
        end = self._end_of_thought(answer, is_open)
        closing = max((each for each in self.closings if answer.endswith(each, 0, end)), key=len, default="")
        if not closing:
            return "", answer
        thought = answer[: end - len(closing)].lstrip()
        opening = max((each for each in self.openings if thought.startswith(each)), key=len, default="")
        return thought.removeprefix(opening).strip("\n"), answer[end:].lstrip("\n")

    def _end_of_thought(self, answer: str, is_open: bool) -> int:
        """An answer that ends inside its thought is a thought as a whole."""
        if not (is_open or answer.lstrip().startswith((*self.openings, *self.closings))):
            return 0
        found = [(answer.find(closing), -len(closing)) for closing in self.closings if closing in answer]
        if not found:
            return len(answer)
        start, length = min(found)
        return start - length


def opening_of_calls(
    prompt: str, header: str, called: str, beside: str | None, names: Sequence[str], closing: str = ""
) -> Opening | None:
    """How a call begins; None for a template that shows no call, or fails on one.

    prompt: that of the answers. header: a rendering with a text, up to the text. called: that of a call without a text.
    beside: what follows the text in that of a text and a call; None if the text is not shown. names: what the call is
    named by. closing: as in Opening.
    """
    same = agreement(header, called)
    own = _before(called[same:], names) if header else None
    if own is None:
        return None
    unless = ""
    if not own:  # the name stands where a text has its recipient
        own, unless = called[agreement(prompt, called) : same], header[same:]
    behind = None if beside is None else _before(beside, names)
    if behind is not None:
        same = agreement(own[::-1], behind[::-1])
        own = own[len(own) - same :] if same else own
    tag = TAG.match(own.lstrip())
    opening = tag[0] if tag else own
    return Opening(opening, unless, tag is None and behind is None, closing) if opening else None


def _before(text: str, names: Sequence[str]) -> str | None:
    """The text before the first of the names; None if it has none of them."""
    places = [place for place in map(text.find, names) if place >= 0]
    return text[: min(places)] if places else None


@frozen
class TokenKinds:
    """Gives the tokens of an answer their kinds. decode: the text of tokens, with special ones."""

    markup: Markup
    decode: Callable[[Sequence[int]], str]
    eos_token_ids: Collection[int]

    def of(self, answer: Sequence[int], before: Sequence[int]) -> np.ndarray:
        """The kind of each token of an answer, places in KINDS, uint8 [S]. Only its last token can be an end.

        before: the tokens before the answer, of which the last ones show whether a thought was opened. A token that
        begins before a thought's end is reasoning; one that has the first character of a call is a call.
        """
        ids = list(answer)
        text = self.decode(ids)
        thought, call = self.markup.parts(text, self.markup.is_opened_by(self.decode(list(before[-NEAR:]))))
        kinds = np.full(len(ids), TEXT, dtype=np.uint8)
        places = range(len(ids) + 1)
        if call < len(text):
            kinds[bisect_right(places, call, key=lambda end: len(self.decode(ids[:end]))) - 1 :] = CALL
            behind = self.markup.end_of_calls(text, call)
            if behind < len(text):
                kinds[bisect_left(places, behind, key=lambda end: len(self.decode(ids[:end]))) :] = TEXT
        if thought:
            kinds[: bisect_left(places, thought, key=lambda end: len(self.decode(ids[:end])))] = REASONING
        if ids and ids[-1] in self.eos_token_ids:
            kinds[-1] = END
        return kinds
