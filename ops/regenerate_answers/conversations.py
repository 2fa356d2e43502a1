"""Conversations that are answered again, turn after turn, by any backend.

Each prompt holds the target's own earlier answers. A conversation that ends with its user's turn gets an answer there.
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
SPECIAL_IN_ANSWER = "special token in the target's answer"  # that of a prompt is found before it is asked


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a sample, an empty answer behind them where the user has the last word."""
    turns = list(row["messages"])
    spoken = [turn["role"] for turn in turns if turn["role"] != "system"]
    return [*turns, {"role": "assistant", "content": []}] if spoken[-1:] == ["user"] else turns


def with_answers(turns: Messages, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The turns with these answers in place of theirs, up to the next answer, or to the end."""
    given, messages = iter(texts), []
    for turn in turns:
        if turn["role"] != "assistant":
            messages.append(turn)
        elif (text := next(given, None)) is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        else:
            break
    return messages


@define
class Conversation:
    """A sample under way. reason: why it can be asked no more, empty where it can."""

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
        """Of the next answer."""
        return self.row["id"], len(self.answers)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns before the next answer."""
        return with_answers(self.turns, [answer.text for answer in self.answers])

    def take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.reason, self.detail = answer.reason, answer.detail

    def outcome(self) -> dict[str, Any]:
        """What a shard of the work folder keeps: the answers, and why there are no more."""
        return {
            "id": self.row["id"],
            "answers": [asdict(answer) for answer in self.answers],
            "reason": self.reason,
            "detail": self.detail,
        }

    def drop(self, reason: str, detail: str) -> None:
        """Ask no more."""
        self.reason, self.detail = reason, detail

    def judged(self, said: Answer, same: Callable[[Messages], bool]) -> Answer:
        """The next answer with what its tokenisation says of it; same(messages up to it): see `Prompts.gives`."""
        if not said.text.strip():
            return evolve(said, reason=EMPTY_ANSWER)
        messages = with_answers(self.turns, [*(answer.text for answer in self.answers), said.text])
        answered = max(place for place, turn in enumerate(messages) if turn["role"] == "assistant")
        try:
            return evolve(said, retokenised_differently=not same(messages[: answered + 1]))
        except Unusable as fault:
            reason = SPECIAL_IN_ANSWER if fault.reason == SPECIAL_IN_TEXT else fault.reason
            return evolve(said, reason=reason, detail=fault.detail)
