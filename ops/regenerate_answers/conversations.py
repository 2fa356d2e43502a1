"""Conversations that are answered again, turn by turn, by any backend.

Each prompt contains the target's own earlier answers. A conversation that ends with the user's turn gets an answer.
Nothing here depends on the filters, which run.py applies to what was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import Factory, asdict, define, evolve, field

from ops.lib.data.sample_account import Unusable
from ops.regenerate_answers.shards import Answer, Key
from ops.tokenize_chat.template import SPECIAL_IN_TEXT, Messages

LONG_PROMPT = "prompt longer than max_prompt_tokens"
IMAGE_IN_ANSWER = "image in an answer"
NOTHING_ASKED = "no turn to answer"
EMPTY_ANSWER = "empty answer"
SPECIAL_IN_ANSWER = "special token in the target's answer"  # those in a prompt are found before the request


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a sample, with an empty answer at the end if the last turn is the user's."""
    turns = list(row["messages"])
    spoken = [turn["role"] for turn in turns if turn["role"] != "system"]
    return [*turns, {"role": "assistant", "content": []}] if spoken[-1:] == ["user"] else turns


def with_answers(turns: Messages, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The turns with these answers in place of their own, up to the next answer, or to the end."""
    remaining, messages = iter(texts), []
    for turn in turns:
        if turn["role"] != "assistant":
            messages.append(turn)
        elif (text := next(remaining, None)) is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        else:
            break
    return messages


@define
class Conversation:
    """A sample being answered. reason: why it is dropped, empty if it is not."""

    row: dict[str, Any]
    answers: list[Answer] = field(factory=list)
    reason: str = ""
    detail: str = ""
    turns: list[dict[str, Any]] = field(default=Factory(lambda self: turns_of(self.row), takes_self=True))
    wanted: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        answers = [turn for turn in self.turns if turn["role"] == "assistant"]
        self.wanted = len(answers)
        if any(part["type"] == "image" for turn in answers for part in turn["content"]):
            self.reason = IMAGE_IN_ANSWER
        elif not answers:
            self.reason = NOTHING_ASKED

    @property
    def finished(self) -> bool:
        return bool(self.reason) or len(self.answers) == self.wanted

    @property
    def key(self) -> Key:
        """The key of the next answer."""
        return self.row["id"], len(self.answers)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns before the next answer."""
        return with_answers(self.turns, [answer.text for answer in self.answers])

    def take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.reason, self.detail = answer.reason, answer.detail

    def outcome(self) -> dict[str, Any]:
        """Its line in a shard of the work folder: the answers, and the reason for which it is dropped."""
        return {
            "id": self.row["id"],
            "answers": [asdict(answer) for answer in self.answers],
            "reason": self.reason,
            "detail": self.detail,
        }

    def drop(self, reason: str, detail: str) -> None:
        """Request no further answers."""
        self.reason, self.detail = reason, detail

    def judged(self, answer: Answer, same: Callable[[Messages], bool]) -> Answer:
        """The next answer with the result of its tokenisation; same(messages up to it): see `Prompts.gives`."""
        if not answer.text.strip():
            return evolve(answer, reason=EMPTY_ANSWER)
        messages = with_answers(self.turns, [*(earlier.text for earlier in self.answers), answer.text])
        last = max(place for place, turn in enumerate(messages) if turn["role"] == "assistant")
        try:
            return evolve(answer, retokenised_differently=not same(messages[: last + 1]))
        except Unusable as fault:
            reason = SPECIAL_IN_ANSWER if fault.reason == SPECIAL_IN_TEXT else fault.reason
            return evolve(answer, reason=reason, detail=fault.detail)
