"""Conversations that are answered anew, turn after turn, and what becomes of each sample.

The answers of a turn are generated for all samples before the next turn is asked, so that samples of similar length
share a batch; each prompt holds the target's own earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import Factory, define, field, frozen

from dsl.errors import StopRequested
from ops.capture_targets.run import batches_by_length
from ops.load_target.model import Target
from ops.regenerate_answers.decode import Sampling, ended, generate, uniform_draws
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.prompts import Prompts
from ops.tokenize_chat.template import Unusable

LONG_PROMPT = "prompt longer than max_prompt_tokens"
IMAGE_IN_ANSWER = "image in an answer"
EMPTY_ANSWER = "empty answer"
FINISHED = "finish reason {}"
TOO_SHORT, TOO_LONG = "fewer than min_answer_tokens", "more than max_answer_tokens"


@define
class Conversation:
    """A sample under way. messages: the turns so far, the answers being the target's own."""

    row: dict[str, Any]
    messages: list[dict[str, Any]] = field(factory=list)
    finish_reasons: list[str] = field(factory=list)
    answer_tokens: list[int] = field(factory=list)
    retokenised_differently: int = 0
    reason: str = ""
    detail: str = ""
    pending: list[dict[str, Any]] = field(
        default=Factory(lambda conversation: list(conversation.row["messages"]), takes_self=True)
    )

    def advance(self) -> bool:
        """Take over the turns up to the next answer; false where none is left to give, or the sample is dropped."""
        while self.pending and not self.reason:
            turn = self.pending.pop(0)
            if turn["role"] == "assistant":
                if any(part["type"] == "image" for part in turn["content"]):
                    self.drop(IMAGE_IN_ANSWER)
                return not self.reason
            self.messages.append(turn)
        return False

    @property
    def finished(self) -> bool:
        answers = sum(turn["role"] == "assistant" for turn in self.row["messages"])
        return bool(self.reason) or len(self.answer_tokens) == answers

    def drop(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail

    def outcome(self) -> dict[str, Any]:
        """What a shard of the work folder keeps: the new row, or why there is none."""
        kept = {
            **self.row,
            "messages": self.messages,
            "finish_reasons": self.finish_reasons,
            "answer_tokens": self.answer_tokens,
        }
        return {
            "id": self.row["id"],
            "row": None if self.reason else kept,
            "reason": self.reason,
            "detail": self.detail,
            "answers": len(self.answer_tokens),
            "tokens": sum(self.answer_tokens),
            "retokenised_differently": self.retokenised_differently,
        }


@frozen
class Answerer:
    """Everything that is the same for all samples."""

    config: RegenerateAnswers
    target: Target
    prompts: Prompts
    stop_requested: Callable[[], bool]

    def answer(self, rows: Sequence[dict[str, Any]], report: Callable[[int], None]) -> list[dict[str, Any]]:
        """The outcome of each sample, in order. report(n): n of them are finished. Raises StopRequested."""
        conversations = [Conversation(row) for row in rows]
        asked = [conversation for conversation in conversations if conversation.advance()]
        while asked:
            lengths = [self._prompt_length(conversation) for conversation in asked]
            places = [place for place, length in enumerate(lengths) if length]
            padded = [lengths[place] + self.config.max_new_tokens for place in places]
            for batch in batches_by_length(padded, self.config.batch_tokens):
                if self.stop_requested():
                    raise StopRequested("regeneration stopped inside a shard; finished shards are kept")
                self._answer_batch([asked[places[index]] for index in batch])
                report(sum(conversation.finished for conversation in conversations))
            asked = [conversation for conversation in asked if conversation.advance()]
        return [conversation.outcome() for conversation in conversations]

    def _prompt_length(self, conversation: Conversation) -> int:
        """Tokens of what the target is asked next; 0 where the sample is dropped.

        The prompt is made again when its turn has come: the pixels of a whole shard may not fit into memory.
        """
        try:
            length = len(self.prompts.sample(conversation.row, conversation.messages).input_ids)
        except Unusable as fault:
            conversation.drop(fault.reason, fault.detail)
            return 0
        if length > self.config.max_prompt_tokens:
            conversation.drop(LONG_PROMPT, f"{length} tokens")
            return 0
        return length

    def _answer_batch(self, asked: Sequence[Conversation]) -> None:
        config = self.config
        draws = [
            uniform_draws(config.seed or 0, asking.row["id"], len(asking.answer_tokens), config.max_new_tokens)
            for asking in asked
        ]
        prompts = [self.prompts.sample(asking.row, asking.messages) for asking in asked]
        sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p)
        answers = generate(self.target, prompts, torch.stack(draws), sampling)
        for conversation, tokens in zip(asked, answers, strict=True):
            self._take(conversation, tokens)

    def _take(self, conversation: Conversation, tokens: list[int]) -> None:
        """Append an answer to its conversation, or drop the sample."""
        config = self.config
        stopped = ended(tokens, self.target.eos_token_ids)
        finish_reason = "stop" if stopped else "length"
        text = self.prompts.text(tokens[:-1] if stopped else tokens)
        conversation.finish_reasons.append(finish_reason)
        conversation.answer_tokens.append(len(tokens))
        conversation.messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        if finish_reason not in config.finish_reasons:
            conversation.drop(FINISHED.format(finish_reason))
        elif len(tokens) < config.min_answer_tokens:
            conversation.drop(TOO_SHORT, f"{len(tokens)} tokens")
        elif config.max_answer_tokens is not None and len(tokens) > config.max_answer_tokens:
            conversation.drop(TOO_LONG, f"{len(tokens)} tokens")
        elif not text.strip():
            conversation.drop(EMPTY_ANSWER)
        else:
            self._compare(conversation, tokens)

    def _compare(self, conversation: Conversation, tokens: list[int]) -> None:
        """Count an answer whose text is tokenised otherwise than it was generated."""
        try:
            same = self.prompts.gives(conversation.messages, tokens, conversation.row["id"])
        except Unusable as fault:
            conversation.drop(fault.reason, fault.detail)
        else:
            conversation.retokenised_differently += not same
