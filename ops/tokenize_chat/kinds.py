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
REASONING, TEXT, CALL, END = map(KINDS.index, ("reasoning", "text", "call", "end"))


@frozen
class Markup:
    """The texts around the parts of an answer.

    openings, closings    of a thought
    is_open               whether the generation prompt has opened a thought
    call                  the opening of a call; None if the template shows no calls
    call_comes_first      whether a call is one only as the first characters of an answer, or behind its thought
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    is_open: bool
    call: str | None
    call_comes_first: bool

    def parts(self, answer: str) -> tuple[int, int]:
        """The end of an answer's thought, 0 without one, and the start of its calls, its length without any."""
        thought = self._end_of_thought(answer)
        call = -1
        if self.call is not None:
            call = answer.find(self.call, thought)
        if call >= 0 and self.call_comes_first and answer[thought:call].strip():
            call = -1
        return thought, call if call >= 0 else len(answer)

    def apart(self, answer: str) -> tuple[str, str]:
        """The thought of an answer, without the texts around it, and the rest; without a whole thought "" and all."""
        end = self._end_of_thought(answer)
        closing = max((each for each in self.closings if answer.endswith(each, 0, end)), key=len, default="")
        if not closing:
            return "", answer
        thought = answer[: end - len(closing)].lstrip()
        opening = max((each for each in self.openings if thought.startswith(each)), key=len, default="")
        return thought.removeprefix(opening).strip("\n"), answer[end:].lstrip("\n")

    def _end_of_thought(self, answer: str) -> int:
        """An answer that ends inside its thought is a thought as a whole."""
        if not (self.is_open or answer.lstrip().startswith((*self.openings, *self.closings))):
            return 0
        found = [(answer.find(closing), -len(closing)) for closing in self.closings if closing in answer]
        if not found:
            return len(answer)
        start, length = min(found)
        return start - length


def opening_of_calls(header: str, called: str, beside: str | None, names: Sequence[str]) -> tuple[str | None, bool]:
    """The opening of a call, and whether it comes first. None for a template that shows no call, or fails on one.

    header: a rendering with another answer. called: the rendering of a call without a text. beside: what follows the
    text in that of a text and a call; None if the text is not shown. names: what the call is named by.
    """
    own = _before(called[agreement(header, called) :], names) if header else None
    if own is None:
        return None, False
    behind = None if beside is None else _before(beside, names)
    if behind is not None:
        same = agreement(own[::-1], behind[::-1])
        own = own[len(own) - same :] if same else own
    tag = TAG.match(own.lstrip())
    opening = tag[0] if tag else own
    return (opening or None), tag is None and behind is None


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

    def of(self, answer: Sequence[int]) -> np.ndarray:
        """The kind of each token of an answer, places in KINDS, uint8 [S]. Only its last token can be an end.

        A token that begins before a thought's end is reasoning; one that has the first character of a call is a call.
        """
        ids = list(answer)
        text = self.decode(ids)
        thought, call = self.markup.parts(text)
        kinds = np.full(len(ids), TEXT, dtype=np.uint8)
        places = range(len(ids) + 1)
        if call < len(text):
            kinds[bisect_right(places, call, key=lambda end: len(self.decode(ids[:end]))) - 1 :] = CALL
        if thought:
            kinds[: bisect_left(places, thought, key=lambda end: len(self.decode(ids[:end])))] = REASONING
        if ids and ids[-1] in self.eos_token_ids:
            kinds[-1] = END
        return kinds
