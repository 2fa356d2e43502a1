"""Answers of a target behind a server.

A fixed number of workers processes conversations one by one, across shards, each to its end, turn by turn. An answer
depends only on its own conversation, so their order does not matter. Each answer is journalled when it arrives.
Refusals are not: a resumed stage repeats the request, and a refusal is final only with its shard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from dsl.errors import DataError, StopRequested
from ops.lib.data.files import json_line
from ops.lib.data.sample_account import Unusable
from ops.lib.data.shared_shards import POLL_S
from ops.regenerate_answers.client import CALLED, ChatClient, Refused, Reply, request_seed, wire_messages
from ops.regenerate_answers.conversations import LONG_PROMPT, UNREADABLE_CALLS, Conversation, Prompts
from ops.regenerate_answers.op import RegenerateAnswers, ToolResults
from ops.regenerate_answers.shards import Answer, Journal, Progress, Shard
from ops.tokenize_chat.template import Documents, Tools

STOP_POLL_S = 0.1
HOPELESS = 20  # refusals before the first answer: the samples are not at fault


@define
class OpenShard:
    shard: Shard
    journal: Journal
    conversations: list[Conversation]
    open: int

    @classmethod
    def of(cls, shard: Shard, tool_results: ToolResults) -> OpenShard:
        conversations = [Conversation(row, tool_results) for row in shard.rows]
        return cls(shard, shard.journal(), conversations, len(conversations))

    def close(self) -> None:
        """Count a finished conversation; after the last one the shard is written."""
        self.open -= 1
        if not self.open:
            self.shard.finish(conversation.outcome() for conversation in self.conversations)


@frozen
class Request:
    """A prompt to send: its messages, tools and documents, and its ids with one placeholder for each image.

    tokens: their number, with images expanded.
    """

    messages: list[dict[str, Any]]
    tools: Tools
    documents: Documents
    prompt_ids: list[int]
    tokens: int
    has_images: bool
    opens_thought: bool


@frozen(kw_only=True)
class ServerUse:
    """The use of a server in one attempt, by one worker or by all. owner: of the model, if reported."""

    requests: int
    retries: int
    answers: int
    tokens: int
    seconds: float
    owner: str | None

    @classmethod
    def together(cls, workers: Sequence[ServerUse]) -> ServerUse:
        """The uses of several workers added up; of their seconds the longest counts, since they work side by side."""
        return cls(
            requests=sum(each.requests for each in workers),
            retries=sum(each.retries for each in workers),
            answers=sum(each.answers for each in workers),
            tokens=sum(each.tokens for each in workers),
            seconds=max(each.seconds for each in workers),
            owner=next((each.owner for each in workers if each.owner is not None), None),
        )

    def figures(self) -> dict[str, float]:
        """The counts and the speed as metrics."""
        counts = {"requests": self.requests, "retries": self.retries}
        if not self.answers:
            return {**counts}
        return {
            **counts,
            "requests_per_second": self.requests / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }


@define
class EndpointAnswerer:
    """Answers shards with a server. answers, tokens, seconds: of this attempt."""

    config: RegenerateAnswers
    prompts: Prompts
    client: ChatClient
    stop_requested: Callable[[], bool]
    progress: Progress
    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    _refusals: int = 0
    _warned: bool = False
    _taking: asyncio.Lock = field(factory=asyncio.Lock)

    def answer_all(self, work: Iterable[Shard | None]) -> None:
        """Answer the shards that are not finished yet.

        work: yields None while unfinished shards are in work here or by other workers. Raises StopRequested, DataError
        if the server refuses all, and TransientError if it is down. The answers so far are kept.
        """
        start = time.monotonic()
        try:
            asyncio.run(self._answer_all(work))
        finally:
            self.seconds = time.monotonic() - start

    async def _answer_all(self, work: Iterable[Shard | None]) -> None:
        async with self.client:
            queue = self._conversations(work)
            workers = [asyncio.create_task(self._worker(queue)) for _ in range(self.config.concurrency)]
            finished, stop = asyncio.gather(*workers), asyncio.create_task(self._stop())
            ends: set[asyncio.Future[list[None]] | asyncio.Task[None]] = {finished, stop}
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not finished.done():
                    stop.result()
                    raise StopRequested("regeneration stopped; all answers so far are kept")
                finished.result()
            finally:
                for task in (*workers, stop):
                    task.cancel()
                await asyncio.gather(finished, *workers, stop, return_exceptions=True)

    async def _stop(self) -> None:
        while not self.stop_requested():
            await asyncio.sleep(STOP_POLL_S)

    def _conversations(self, work: Iterable[Shard | None]) -> Iterator[tuple[OpenShard, Conversation] | None]:
        for shard in work:
            if shard is None:
                yield None
                continue
            if shard.is_finished:
                continue
            open_shard = OpenShard.of(shard, self.config.tool_results)
            for conversation in open_shard.conversations:
                yield open_shard, conversation

    async def _next(
        self, queue: Iterator[tuple[OpenShard, Conversation] | None]
    ) -> tuple[OpenShard, Conversation] | None:
        """The next conversation, None after the last. While none is free, the first caller waits, and others queue
        behind it.
        """
        async with self._taking:
            for entry in queue:
                if entry is not None:
                    return entry
                await asyncio.sleep(POLL_S)
        return None

    async def _worker(self, queue: Iterator[tuple[OpenShard, Conversation] | None]) -> None:
        while (entry := await self._next(queue)) is not None:
            shard, conversation = entry
            while not conversation.finished:
                await self._next_turn(conversation, shard.journal)
            shard.close()
            self.progress.advance()

    async def _next_turn(self, conversation: Conversation, journal: Journal) -> None:
        if conversation.key not in journal.answers:
            try:
                request = await asyncio.to_thread(self._next_request, conversation)
            except Unusable as fault:
                conversation.drop(fault.reason, fault.detail)
                return
            if request.tokens > self.config.max_prompt_tokens:
                conversation.drop(LONG_PROMPT, f"{request.tokens} tokens")
                return
            drawn = self.client.sampling.temperature > 0
            seed = request_seed(self.config.seed or 0, conversation.key) if drawn else None
            ids = request.prompt_ids if self.config.prompts == "ids" else None
            try:
                reply = await self.client.complete(request.messages, seed, request.tools, ids, request.documents)
            except Refused as fault:
                self._refused(conversation, fault, journal)
                return
            answer = await asyncio.to_thread(self._answer, conversation, request, reply)
            await asyncio.to_thread(journal.add, {conversation.key: answer})
            self.answers, self.tokens = self.answers + 1, self.tokens + answer.tokens
            self.progress.advance(answer.tokens)
        conversation.take(journal.answers[conversation.key])

    def _refused(self, conversation: Conversation, fault: Refused, journal: Journal) -> None:
        """Drop a sample that the server refused. Raises DataError if it has refused all of the first ones."""
        conversation.drop(fault.reason, fault.detail)
        self._refusals += 1
        if self._refusals >= HOPELESS and not self.answers and not journal.answers:
            raise DataError(
                f"{self.config.endpoint} refused all of the first {HOPELESS} samples; the last, "
                f'"{conversation.row["id"]}": {fault.detail}'
            )

    def _next_request(self, conversation: Conversation) -> Request:
        """The next prompt of a conversation. Raises Unusable if it cannot be sent."""
        asked = conversation.asked
        ids, tokens = self.prompts.ids(asked)
        encoded = self.prompts.encoded_images(asked)
        on_the_wire = wire_messages(self.prompts.shown(asked["messages"]), encoded)
        tools, documents = asked.get("tools", ()), asked.get("documents", ())
        opens_thought = self.prompts.opens_thought(asked)
        return Request(on_the_wire, tools, documents, ids, tokens, bool(encoded), opens_thought)

    def _answer(self, conversation: Conversation, request: Request, reply: Reply) -> Answer:
        differently = self._prompted_differently(conversation, request, reply)
        ids, text, calls = reply.token_ids, reply.full_text(request.opens_thought), conversation.with_ids(reply.calls)
        end, written = "stop" if reply.finish_reason in CALLED else reply.finish_reason, text
        if ids is not None:
            closed = bool(ids) and ids[-1] in self.prompts.encoder.processor.eos_token_ids
            written = self.prompts.text(ids[:-1] if closed else ids)
            text = text if calls else written
            tokens = len(ids)
        else:  # without the server's count there is nothing to compare
            said = text + "".join(json_line(call["function"]) for call in calls or ())
            tokens = self.prompts.length(said) + (end == "stop") if reply.tokens is None else reply.tokens
        answer = Answer(text, end, tokens, prompted_differently=differently, ids=ids, called=reply.called, calls=calls)
        if reply.called and not calls and ids is None:
            return evolve(answer, reason=UNREADABLE_CALLS)
        if not reply.called:
            answer = self.prompts.with_calls(conversation, answer)
        answer = self.prompts.as_written(conversation, answer, written)
        if ids is not None:
            return conversation.judged(answer, lambda _: self.prompts.takes(written, ids))
        if reply.tokens is None:
            return conversation.judged(answer, lambda _: True)
        is_cut, name = end != "stop", conversation.row["id"]
        said_tokens = reply.tokens - (not is_cut)  # without EOS, which some templates write only before the next turn
        return conversation.judged(
            answer,
            lambda messages: (
                self.prompts.count(name, messages, request.tools, is_cut, request.documents) == said_tokens
            ),
        )

    def _prompted_differently(self, conversation: Conversation, request: Request, reply: Reply) -> bool:
        """Whether the server reports that it read other prompt tokens. The user is told once.

        Raises DataError if ids were sent.
        """
        if reply.prompt_ids is not None and not request.has_images:
            differently = reply.prompt_ids != request.prompt_ids
        else:  # engines replace image tokens by values of their own
            differently = reply.prompt_tokens is not None and reply.prompt_tokens != request.tokens
        if differently and self.config.prompts == "ids":
            raise DataError(
                f'{self.config.endpoint} did not read the ids of sample "{conversation.row["id"]}", but a prompt of '
                f"{reply.prompt_tokens} tokens instead of {request.tokens}: a server that takes `input_ids` in chats "
                '(SGLang) or ids as `prompt` of completions (vLLM) is needed, or prompts = "messages"'
            )
        if differently and not self._warned:
            self._warned = True
            form = ", and set tools_as" if request.tools else ""
            self.client.info(
                f'the server reads another prompt of sample "{conversation.row["id"]}" ({reply.prompt_tokens} '
                f"tokens) than dflow renders here ({request.tokens}): compare its chat template, its image "
                f"sizes and enable_thinking{form}. Answers to other prompts are worse to learn from"
            )
        return differently

    def served(self) -> ServerUse:
        """The use of the server in this attempt."""
        return ServerUse(
            requests=self.client.requests,
            retries=self.client.retries,
            answers=self.answers,
            tokens=self.tokens,
            seconds=self.seconds,
            owner=self.client.models.get(str(self.config.model)),
        )
