"""What a server reads and its target writes, by transformers' `apply_chat_template` and a hand-written table: slow and
plain, and without any code of dflow, which is compared with it.

The prompt of an answer is the messages before it with the generation prompt, as a server renders it. The answer is what
the chat template writes behind that prompt, up to the first EOS, at which a server stops. Where history is shown
otherwise than it was prompted, a marker at the end of the message before the answer tells where the two meet, and
`Known` says what the prompt of that template holds there and its history does not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from attrs import evolve, field, frozen
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

MARKER = "ZQXJ"  # in no message and no template
DAY = date(2025, 1, 1)  # fixed in training

REFUSED = "refused by the chat template"
FAILED = "chat template fails on the messages"
TOOLS_NOT_SHOWN = "tools not shown by the chat template"
RESULTS_NOT_SHOWN = "tool results not shown by the chat template"
OTHER_THOUGHT = "reasoning does not fit the generation prompt"
ANSWER_CHANGED = "answer changed by the chat template"
NO_TOKEN_BOUNDARY = "answer begins inside a token"


@frozen
class Known:
    """What somebody who has read a template knows of it.

    key: of an answer in which it takes reasoning, "content" if in the text, None if it shows none. thought: the tags
    around reasoning. holds: what a prompt may hold behind the header of its answer that history does not show there.
    header: what history may have before an answer and a prompt does not. rewrites: a text of history, and what the
    prompt had in its place. only_thinking: whether it shows reasoning only without enable_thinking = false.
    """

    key: str | None = "reasoning_content"
    thought: tuple[str, str] = ("<think>", "</think>")
    holds: tuple[str, ...] = ()
    header: str = ""
    rewrites: tuple[str, str] = ("", "")
    only_thinking: bool = False


@frozen
class Sample:
    """Tokens as a target reads and writes them. mask: those that it writes."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


class Dropped(Exception):
    """The template does not show the conversation, or no server asks for such an answer: the reason."""


@frozen
class Server:
    """A checkpoint's tokenizer with its chat template. eos: the tokens at which it stops. options: of the template."""

    tokenizer: PreTrainedTokenizerBase
    eos: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(factory=dict)

    def render(self, messages: Sequence[Message], prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(self.tools),
                add_generation_prompt=prompt,
                tokenize=False,
                strftime_now=DAY.strftime,
                **self.options,
            )
        except TemplateError as error:
            raise Dropped(REFUSED) from error
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise Dropped(FAILED) from error


def samples(server: Server, known: Known, messages: Sequence[Message]) -> list[Sample] | str:
    """The samples of a conversation, or the reason for which it makes none.

    messages: texts as content, arguments as objects, as a server has read them; reasoning as "reasoning_content".
    """
    assert "ops.tokenize_chat" not in sys.modules
    if known.only_thinking and server.options.get("enable_thinking") is False:
        known = evolve(known, key=None)
    given = [_for_template(message, known.key) for message in messages]
    turns = [turn for turn, message in enumerate(given) if message["role"] == "assistant"]
    try:
        prompts = [server.render(given[:turn], prompt=True) for turn in turns]
        _check_shown(server, given[: turns[0]])
        _check_shown(server, given[: turns[-1]])
        fulls = [server.render(given[: turn + 1], prompt=False) for turn in turns]
        answers = []
        for turn, prompt, full in zip(turns, prompts, fulls, strict=True):
            thinks = bool(known.key and messages[turn].get("reasoning_content"))
            if thinks and prompt.rstrip().endswith(known.thought[1]):
                raise Dropped(OTHER_THOUGHT)
            extends = full.startswith(prompt)
            written = full[len(prompt) :] if extends else _behind_marker(server, known, given[: turn + 1])
            written = written.removeprefix(known.header)
            if _opens(known, prompt) and known.thought[1] not in written:
                raise Dropped(OTHER_THOUGHT)
            ends = [written.find(end) + len(end) for end in server.eos if end in written]
            written = written[: min(ends, default=len(written))]
            _check_parts(known, messages[turn], written)
            answers.append((prompt, written))
        return [_tokens(server, *sample) for sample in _joined(answers)]
    except Dropped as dropped:
        return str(dropped)


def _for_template(message: Message, key: str | None) -> Message:
    message = dict(message)
    reasoning = message.pop("reasoning_content", None)
    if reasoning and key == "content":
        message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}".removesuffix("\n\n")
    elif reasoning and key:
        message[key] = reasoning
    return message


def _check_shown(server: Server, messages: Sequence[Message]) -> None:
    """Check that a prompt shows each tool and each result, by a marker in its place."""
    for place, tool in enumerate(server.tools):
        other = {**tool, "function": {**tool["function"], "name": MARKER}}
        tools = (*server.tools[:place], other, *server.tools[place + 1 :])
        if MARKER not in evolve(server, tools=tools).render(messages, prompt=True):
            raise Dropped(TOOLS_NOT_SHOWN)
    for turn, message in enumerate(messages):
        if message["role"] == "tool":
            other = [*messages[:turn], {**message, "content": MARKER}, *messages[turn + 1 :]]
            if MARKER not in server.render(other, prompt=True):
                raise Dropped(RESULTS_NOT_SHOWN)


def _opens(known: Known, prompt: str) -> bool:
    return prompt.rstrip().endswith(known.thought[0])


def _behind_marker(server: Server, known: Known, messages: Sequence[Message]) -> str:
    """What the last of the messages is behind its prompt, where history is not shown as it was prompted."""
    *earlier, before, answer = messages
    marked = [*earlier, {**before, "content": before["content"] + MARKER}]
    prompt = server.render(marked, prompt=True).rpartition(MARKER)[2]
    history = server.render([*marked, answer], prompt=False).rpartition(MARKER)[2]
    history = history.replace(*known.rewrites) if known.rewrites[0] else history
    opening, closing = known.thought
    for held in ("", *known.holds):
        header = prompt.removesuffix(held)
        if not (prompt.endswith(held) and history.startswith(header)):
            continue
        written = history[len(header) :].removeprefix(known.header)
        if closing in held:
            return written.removeprefix(closing)  # which the prompt holds
        if _opens(known, held) and written.startswith(closing):  # as behind a prompt without a thought
            raise Dropped(OTHER_THOUGHT)
        opened = held if written.startswith(held) else opening
        return written.removeprefix(opened) if _opens(known, held) else written
    raise AssertionError(f"read the template, and say in the table what its prompt holds: {prompt!r}, {history!r}")


def _check_parts(known: Known, message: Message, written: str) -> None:
    """Check that an answer shows all that the message has, as often as it has it."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    parts = [message["content"], message.get("reasoning_content", "") if known.key else ""]
    parts += [function["name"] for function in functions]
    parts += [value for function in functions for value in function["arguments"].values()]
    if not all(written.count(part) >= number for part, number in Counter(filter(None, parts)).items()):
        raise Dropped(ANSWER_CHANGED)


def _joined(answers: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(text, spans of what is written) of each sample: an answer goes on in a text that its prompt begins with."""
    text, spans = "", []
    for prompt, written in answers:
        if spans and not prompt.startswith(text):
            yield text, spans
            spans = []
        text = prompt + written
        spans.append((len(prompt), len(text)))
    yield text, spans


def _tokens(server: Server, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
    """The tokens of a sample. An EOS that only the next message writes behind an answer is written by the target."""
    learnt = []
    for start, end in spans:
        closed = any(text.endswith(eos, start, end) for eos in server.eos)
        behind = [eos for eos in server.eos if text.startswith(eos, end)]
        learnt.append((start, end + (0 if closed else max(map(len, behind), default=0))))
    tokens = server.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if not {start for start, _ in learnt} <= {first for first, _ in tokens.offset_mapping}:
        raise Dropped(NO_TOKEN_BOUNDARY)
    inside = [any(start <= first and last <= end for start, end in learnt) for first, last in tokens.offset_mapping]
    return Sample(tuple(tokens.input_ids), tuple(inside))
