"""Answers of a target that is loaded in this process.

The answers of a turn are generated for all samples of a shard before those of the next turn, so that samples of similar
length share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from dsl.errors import StopRequested
from ops.lib.data.batching import batches_by_length
from ops.lib.data.sample_account import Unusable
from ops.lib.data.shared_shards import waited
from ops.lib.drafts.decoding.sampling import uniform_draws
from ops.lib.target.model import Target
from ops.regenerate_answers.conversations import LONG_PROMPT, Conversation, Prompts
from ops.regenerate_answers.decode import generate
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.sampling import Sampling
from ops.regenerate_answers.shards import Answer, Journal, Progress, Shard


@frozen
class Answerer:
    """Answers shards with the target, in this process."""

    config: RegenerateAnswers
    target: Target
    prompts: Prompts
    sampling: Sampling
    stop_requested: Callable[[], bool]
    progress: Progress

    def answer_all(self, work: Iterable[Shard | None]) -> None:
        """Answer the shards that are not finished yet. Raises StopRequested.

        work: yields None while other workers have the unfinished shards.
        """
        for shard in waited(work, self.stop_requested):
            if not shard.is_finished:
                shard.finish(self.answer(shard.rows, shard.journal()))
            self.progress.advance()

    def answer(self, rows: Sequence[dict[str, Any]], journal: Journal) -> list[dict[str, Any]]:
        """The outcome of each sample, in order. Raises StopRequested.

        Batches are formed as if the journal were empty, and its answers are then left out of them: where an earlier
        attempt ended changes no more than the rounding of a batch.
        """
        conversations = [Conversation(row, self.config.tool_results) for row in rows]
        while pending := [conversation for conversation in conversations if not conversation.finished]:
            lengths = [self._prompt_length(conversation) for conversation in pending]
            places = [place for place, length in enumerate(lengths) if length]
            padded = [lengths[place] + self.config.max_new_tokens for place in places]
            for batch in batches_by_length(padded, self.config.batch_tokens):
                self._answer_batch([pending[places[index]] for index in batch], journal)
        return [conversation.outcome() for conversation in conversations]

    def _prompt_length(self, conversation: Conversation) -> int:
        """The number of tokens of the next prompt; 0 if the sample is dropped.

        Its images are decoded later with its batch, as a shard's pixels may not fit into memory.
        """
        try:
            _, length = self.prompts.ids(conversation.asked)
        except Unusable as fault:
            conversation.drop(fault.reason, fault.detail)
            return 0
        if length > self.config.max_prompt_tokens:
            conversation.drop(LONG_PROMPT, f"{length} tokens")
            return 0
        return length

    def _answer_batch(self, batch: Sequence[Conversation], journal: Journal) -> None:
        missing = [conversation for conversation in batch if conversation.key not in journal.answers]
        if missing:
            self._generate(missing, journal)
        for conversation in batch:
            conversation.take(journal.answers[conversation.key])

    def _generate(self, batch: Sequence[Conversation], journal: Journal) -> None:
        """Journal the next answer of each conversation, from one batch, as each ends. Raises StopRequested."""

        def after_step(ended: Mapping[int, list[int]], tokens: int) -> None:
            if ended:
                journal.add({batch[row].key: self._answer(batch[row], answer) for row, answer in ended.items()})
            self.progress.advance(tokens)
            if self.stop_requested():
                raise StopRequested("regeneration stopped; all answers so far are kept")

        config = self.config
        draws = [uniform_draws(config.seed or 0, *each.key, config.max_new_tokens) for each in batch]
        prompts = [self.prompts.sample(each.asked) for each in batch]
        generate(self.target, prompts, torch.stack(draws), self.sampling, after_step)

    def _answer(self, conversation: Conversation, tokens: list[int]) -> Answer:
        stopped = bool(tokens) and tokens[-1] in self.target.eos_token_ids
        text = self.prompts.text(tokens[:-1] if stopped else tokens)
        answer = Answer(text, "stop" if stopped else "length", len(tokens), ids=tokens)
        answer = self.prompts.as_written(conversation, self.prompts.with_calls(conversation, answer), text)
        return conversation.judged(answer, lambda _: self.prompts.takes(text, tokens))
