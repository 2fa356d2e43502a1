"""Conversations that are answered anew, turn after turn.

The answers of a turn are generated for all samples of a shard before the next turn is asked, so that samples of similar
length share a batch; each prompt holds the target's own earlier answers. A conversation that ends with its user's turn
gets an answer there. Nothing here depends on the filters, which filters.py applies to what was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import Factory, asdict, define, field, frozen

from dsl.errors import StopRequested
from ops.capture_targets.run import batches_by_length
from ops.load_target.model import Target
from ops.regenerate_answers.decode import Sampling, ended, generate, uniform_draws
from ops.regenerate_answers.journal import Answer, Journal, Key
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.prompts import Prompts
from ops.tokenize_chat.template import Messages, Unusable

LONG_PROMPT = "prompt longer than max_prompt_tokens"
IMAGE_IN_ANSWER = "image in an answer"
NOTHING_ASKED = "no turn to answer"
EMPTY_ANSWER = "empty answer"


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


@frozen
class Answerer:
    """Everything that is the same for all samples."""

    config: RegenerateAnswers
    target: Target
    prompts: Prompts
    stop_requested: Callable[[], bool]

    def answer(
        self, rows: Sequence[dict[str, Any]], journal: Journal, report: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """The outcome of each sample, in order. report(n): n of them are finished. Raises StopRequested.

        Batches are cut as if the journal were empty, so that answers do not depend on where an earlier attempt ended.
        """
        conversations = [Conversation(row) for row in rows]
        while asked := [conversation for conversation in conversations if not conversation.finished]:
            lengths = [self._prompt_length(conversation) for conversation in asked]
            places = [place for place, length in enumerate(lengths) if length]
            padded = [lengths[place] + self.config.max_new_tokens for place in places]
            for batch in batches_by_length(padded, self.config.batch_tokens):
                self._answer_batch([asked[places[index]] for index in batch], journal)
                report(sum(conversation.finished for conversation in conversations))
        return [conversation.outcome() for conversation in conversations]

    def _prompt_length(self, conversation: Conversation) -> int:
        """Tokens of what the target is asked next; 0 where the sample is dropped.

        The prompt is made again when its turn has come: the pixels of a whole shard may not fit into memory.
        """
        try:
            length = len(self.prompts.sample(conversation.row, conversation.messages).input_ids)
        except Unusable as fault:
            conversation.reason, conversation.detail = fault.reason, fault.detail
            return 0
        if length > self.config.max_prompt_tokens:
            conversation.reason, conversation.detail = LONG_PROMPT, f"{length} tokens"
            return 0
        return length

    def _answer_batch(self, asked: Sequence[Conversation], journal: Journal) -> None:
        missing = [conversation for conversation in asked if conversation.key not in journal.answers]
        if missing:
            if self.stop_requested():
                raise StopRequested("regeneration stopped; all answers so far are kept")
            journal.add(self._generated(missing))
        for conversation in asked:
            conversation.take(journal.answers[conversation.key])

    def _generated(self, asked: Sequence[Conversation]) -> dict[Key, Answer]:
        """The next answer of each conversation, from one batch."""
        config = self.config
        draws = [uniform_draws(config.seed or 0, *asking.key, config.max_new_tokens) for asking in asked]
        prompts = [self.prompts.sample(asking.row, asking.messages) for asking in asked]
        sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p)
        answers = generate(self.target, prompts, torch.stack(draws), sampling)
        return {asking.key: self._answer(asking, tokens) for asking, tokens in zip(asked, answers, strict=True)}

    def _answer(self, conversation: Conversation, tokens: list[int]) -> Answer:
        stopped = ended(tokens, self.target.eos_token_ids)
        text = self.prompts.text(tokens[:-1] if stopped else tokens)
        said = (text, "stop" if stopped else "length", len(tokens))
        if not text.strip():
            return Answer(*said, reason=EMPTY_ANSWER)
        messages = with_answers(conversation.turns, [*(answer.text for answer in conversation.answers), text])
        answered = max(place for place, turn in enumerate(messages) if turn["role"] == "assistant")
        try:
            same = self.prompts.gives(messages[: answered + 1], tokens)
        except Unusable as fault:
            return Answer(*said, reason=fault.reason, detail=fault.detail)
        return Answer(*said, retokenised_differently=not same)
