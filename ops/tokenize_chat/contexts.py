"""Answers in the contexts in which a server asks for them.

An answer is what follows the prompt that a server renders from everything before it: `prompt`, the messages before the
answer with the generation prompt. `full` are the messages up to and with the answer. Where `full` begins with `prompt`,
the answer is the rest. Else the template shows history otherwise than it prompted for it, and the answer begins in
`full` behind its header (`_answer_behind_header`). Then the text is the prompt and the answer, as the target wrote it.
A header that only history has is no part of the answer: that of Diffusion Gemma has one behind results, where the
prompt goes on in the turn of the call.

An answer of which the target's ids are known is these ids: nothing of it is rendered, since some templates cannot show
what their targets write.

An answer whose prompt begins with the text so far continues the same sample; any other begins a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from types import MappingProxyType
from typing import Any

from attrs import define, evolve, field, frozen

from ops.ingest.sample import END_OF_THOUGHT
from ops.lib.data.sample_account import Unusable
from ops.tokenize_chat.answer_spans import Rendered
from ops.tokenize_chat.habits import IN_TEXT, THOUGHT, WORDS, Habits, Parted, parted, with_thought
from ops.tokenize_chat.kinds import TAG
from ops.tokenize_chat.rendering import agreement
from ops.tokenize_chat.template import (
    ANSWER_CHANGED,
    ANSWER_NOT_FOUND,
    DOCUMENTS_NOT_SHOWN,
    OTHER_THOUGHT,
    RESULTS_NOT_SHOWN,
    TOOLS_NOT_SHOWN,
    Documents,
    Messages,
    Rendering,
    Renderings,
    Text,
    Tools,
    strings_in,
    texts_of,
)

AT_ONCE = 16  # answers rendered by one request, so that a long conversation's texts are not in memory together
LONGEST_TAG = 64
SHORT_IDS = "call{:05}"
MARK = "dflow7c1e9{}{}x"  # letters and digits, as in the names of functions, and in no sample


@frozen
class Generated:
    """An answer as its target generated it. ids: with the EOS unless it was cut. text: theirs."""

    ids: tuple[int, ...]
    text: str


@frozen
class Context(Rendered):
    """A text as the target reads and writes it. The ends of `answers` are those of what is learnt.

    turns: the message of each answer. number: that of the first answer in its conversation, from 1 on. generated: the
    ids of each answer, None where they are unknown.
    """

    turns: tuple[int, ...] = ()
    number: int = 1
    generated: tuple[tuple[int, ...] | None, ...] = ()

    @property
    def tokenized(self) -> str:
        """The part of the text that is tokenised: without a last answer whose ids are known."""
        return self.text if self.generated[-1] is None else self.text[: self.prompt_end]

    def up_to(self, answers: int) -> Context:
        """The text up to the end of one of its answers."""
        start, end = self.answers[answers - 1]
        return evolve(
            self,
            text=self.text[:end],
            prompt_end=start,
            answers=self.answers[:answers],
            turns=self.turns[:answers],
            generated=self.generated[:answers],
        )

    def behind(self, answers: int) -> Context:
        """The same text with the answers behind so many."""
        return evolve(
            self,
            answers=self.answers[answers:],
            turns=self.turns[answers:],
            number=self.number + answers,
            generated=self.generated[answers:],
        )


@frozen
class Served:
    """The contexts of a conversation's answers.

    empty_thoughts: answers without reasoning that begin with an empty thought. without_reasoning: answers whose
    reasoning, under a key of its own, was removed, since the template shows none.
    """

    contexts: tuple[Context, ...]
    empty_thoughts: int
    without_reasoning: int


@frozen
class Asked:
    """An answer in a text: the ends of the prompt that it follows, and of what is learnt.

    closed: whether an EOS ends there. turn, number: of the message and the answer. ids: of the answer, if they are
    known.
    """

    prompt_end: int
    end: int
    closed: bool
    turn: int
    number: int
    ids: tuple[int, ...] | None = None


@define
class _Contexts:
    """Contexts as they grow, answer by answer. Of the open one, only the text up to its last answer is kept."""

    eos: Sequence[str]
    done: list[Context] = field(factory=list)
    _open: list[Asked] = field(factory=list)
    _text: str = ""

    def add(self, answer: Asked, text: str) -> None:
        """Add an answer, with its prompt and itself as `text`."""
        if self._open and not text.startswith(self._text[: self._open[-1].end], 0, answer.prompt_end):
            self.finish()
        self._open.append(answer)
        self._text = text

    def finish(self) -> None:
        first, last = self._open[0], self._open[-1]
        answers = tuple((answer.prompt_end, self._end(answer, self._text)) for answer in self._open)
        turns, ids = tuple(answer.turn for answer in self._open), tuple(answer.ids for answer in self._open)
        self.done.append(Context(self._text, last.prompt_end, answers, turns, first.number, ids))
        self._open = []

    def _end(self, answer: Asked, text: str) -> int:
        """The end of what is learnt: with the EOS that only the next message writes, as those of GLM do."""
        if answer.closed:
            return answer.end
        return answer.end + max(map(len, filter(lambda each: text.startswith(each, answer.end), self.eos)), default=0)


def serve(
    habits: Habits,
    eos: Sequence[str],
    messages: Messages,
    tools: Tools = (),
    cut: Sequence[bool] = (),
    last_only: bool = False,
    keeps_reasoning: bool = True,
    generated: Mapping[int, Generated] = MappingProxyType({}),
) -> Renderings[Served]:
    """Render the contexts of a conversation that ends with an answer.

    eos: the texts of the EOS tokens. cut: for each answer, whether it was cut off, so that its EOS is not learnt.
    last_only: only the last answer's context. keeps_reasoning: whether earlier reasoning is part of a prompt.
    generated: the answers whose ids are known, by turn. Raises Unusable for another answer that does not fit its
    prompt, or of which the template does not show all.
    """
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if any(cut) and len(cut) != len(turns):
        raise Unusable(ANSWER_NOT_FOUND, f"{len(cut)} answers in {len(turns)} turns: the cut one is unknown")
    own, history, answers = as_shown(habits, messages, keeps_reasoning)
    numbered = list(zip(turns, count(1), cut or [False] * len(turns), strict=False))[-1 if last_only else 0 :]
    grown, empty, removed = _Contexts(eos), 0, 0
    yield from check_shown(history[: turns[-1]], tools)
    for start in range(0, len(numbered), AT_ONCE):
        some = numbered[start : start + AT_ONCE]
        wanted: list[Rendering] = []
        for turn, _, _ in some:
            wanted.append(Rendering(history[:turn], prompt=True, tools=tools))
            if turn not in generated:
                wanted.append(Rendering([*history[:turn], own[turn]], tools=tools))
        shown = iter((yield wanted))
        pairs = []
        for turn, _, _ in some:
            prompt = next(shown).text
            pairs.append((prompt, prompt + generated[turn].text if turn in generated else next(shown).text))
        probes = yield from _probed(habits, history, own, tools, [turn for turn, _, _ in some], pairs)
        for (turn, number, was_cut), (prompt, full), probe in zip(some, pairs, probes, strict=True):
            if turn in generated:
                grown.add(Asked(len(prompt), len(full), True, turn, number, generated[turn].ids), full)
                continue
            if probe is not None:
                full, probe = _without_header(habits, prompt, full, probe)
            answer = full[len(prompt) :]
            if habits.reasoning is not None and answers[turn].thought and habits.ends_closed(prompt):
                raise _other_thought(habits, prompt)
            if probe is not None and not full.startswith(prompt):
                answer = _answer_behind_header(habits, prompt, full, answers[turn], probe)
            elif habits.ends_open(prompt) and not habits.closes(answer) and not was_cut:
                raise _no_thought(habits, prompt)
            words, end = _learnt(answer, eos)
            _check_shown(own[turn], answers[turn], answer[:end], habits)
            grown.add(
                Asked(
                    len(prompt),
                    len(prompt) + (words if was_cut else end),
                    closed=was_cut or words < end,
                    turn=turn,
                    number=number,
                ),
                prompt + answer,
            )
            empty += not answers[turn].thought and habits.begins_empty(answer)
            removed += habits.reasoning is None and bool(answers[turn].thought)
    grown.finish()
    return Served(tuple(grown.done), empty, removed)


def serve_prompt(habits: Habits, messages: Messages, tools: Tools, keeps_reasoning: bool) -> Renderings[Rendered]:
    """Render what a server asks after the messages, without an answer."""
    _, history, _ = as_shown(habits, messages, keeps_reasoning)
    text = yield from whole_prompt(history, tools)
    return Rendered(text, len(text), ())


def whole_prompt(messages: Messages, tools: Tools) -> Renderings[str]:
    """Render the messages with the generation prompt after them. Raises Unusable as `check_shown` does."""
    (prompt,) = yield [Rendering(messages, prompt=True, tools=tools)]
    yield from check_shown(messages, tools)
    return prompt.text


def calls_text(
    habits: Habits, eos: Sequence[str], messages: Messages, calls: Sequence[dict[str, Any]], tools: Tools
) -> Renderings[str]:
    """Render what an answer of only these calls is after the messages, without EOS; "" if the template fails on it."""
    answer = {"role": "assistant", "content": [], "tool_calls": list(calls)}
    with_text = {**answer, "content": [{"type": "text", "text": WORDS}]}
    prompt, *wanted = (
        as_shown(habits, each, True)[1] for each in (messages, [*messages, with_text], [*messages, answer])
    )
    before, beside, alone = yield [
        Rendering(prompt, prompt=True, tools=tools, may_fail=True),
        *(Rendering(each, tools=tools, may_fail=True) for each in wanted),
    ]
    text = beside.text.rpartition(WORDS)[2]
    if WORDS not in beside.text:
        text = alone.text[agreement(before.text, alone.text) :]
    return text[: _learnt(text, eos)[0]]


def as_shown(
    habits: Habits, messages: Messages, keeps_reasoning: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[int, Parted]]:
    """Each message as the template takes it when it is new, and as it takes it later; the answers with thoughts apart.

    Of a template that takes no others, the ids of calls are made anew.
    """
    if habits.short_ids:
        messages = _with_short_ids(messages)
    own, history, answers = list(messages), list(messages), {}
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            answers[turn] = answer = parted(message, habits.reasoning is not None)
            own[turn] = history[turn] = answer.message
            if habits.reasoning is not None and answer.thought:
                in_text = habits.reasoning == IN_TEXT and END_OF_THOUGHT in "".join(texts_of(message))
                own[turn] = message if in_text else with_thought(answer.message, habits.reasoning, answer.thought)
                history[turn] = own[turn] if keeps_reasoning else answer.message
    return own, history, answers


def _with_short_ids(messages: Messages) -> list[dict[str, Any]]:
    new: dict[str, str] = {}
    made = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            new |= {
                call["id"]: SHORT_IDS.format(len(new) + place) for place, call in enumerate(message["tool_calls"], 1)
            }
            changed["tool_calls"] = [{**call, "id": new[call["id"]]} for call in message["tool_calls"]]
        if message.get("tool_call_id") in new:
            changed["tool_call_id"] = new[message["tool_call_id"]]
        made.append(changed)
    return made


@frozen
class _Probe:
    """Renderings that show where the header of an answer ends, for one whose prompt its conversation does not show, or
    behind whose prompt it shows a header.

    before: the messages before it, without a generation prompt. plain, other: `full` with a plain answer, and with one
    of other words. marked: `full` with `mark` at the end of the message before the answer, to see where that ends.
    """

    before: Text
    plain: Text
    other: Text
    marked: Text
    mark: str


def _probed(
    habits: Habits,
    history: Messages,
    own: Messages,
    tools: Tools,
    turns: Sequence[int],
    pairs: Sequence[tuple[str, str]],
) -> Renderings[list[_Probe | None]]:
    """A probe for each answer that needs one."""

    def needs_one(prompt: str, full: str) -> bool:
        return not full.startswith(prompt) or (bool(habits.header) and full.startswith(habits.header, len(prompt)))

    needed = [turn for turn, pair in zip(turns, pairs, strict=True) if needs_one(*pair)]
    if not needed:
        return [None] * len(turns)
    everything = "\0".join(strings_in([own, tools]))
    mark = next((each for each in map(chr, range(ord(THOUGHT), 0xFFFFE)) if each not in everything), None)
    if mark is None:
        raise Unusable(ANSWER_NOT_FOUND, "the texts use every character that could mark one")
    wanted: list[Rendering] = []
    for turn in needed:
        before = list(history[:turn])
        marked = [*before[:-1], _marked(before[-1], mark)] if before else []
        wanted.append(Rendering(before, tools=tools, may_fail=True))
        for messages in ([*before, _plain(mark)], [*before, _other(own[turn], mark)], [*marked, own[turn]]):
            wanted.append(Rendering(messages, tools=tools, may_fail=True))
    texts = iter((yield wanted))
    found = {turn: _Probe(next(texts), next(texts), next(texts), next(texts), mark) for turn in needed}
    return [found.get(turn) for turn in turns]


def _plain(mark: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": mark}]}


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**message, "content": [*message["content"], {"type": "text", "text": mark}]}


def _other(answer: dict[str, Any], mark: str) -> dict[str, Any]:
    """The answer with the mark in the place of its text, reasoning, names and arguments."""
    changed = {key: mark if key not in ("role", "content", "tool_calls") else value for key, value in answer.items()}
    if any(text.strip() for text in texts_of(answer)):
        changed["content"] = [{"type": "text", "text": mark}]
    if "tool_calls" in answer:
        function = {"name": mark, "arguments": {mark: mark}}
        changed["tool_calls"] = [{**call, "function": function} for call in answer["tool_calls"]]
    return changed


def _without_header(habits: Habits, prompt: str, full: str, probe: _Probe) -> tuple[str, _Probe]:
    """`full` and the probe's answers without a header that the generation prompt lacks."""
    generation = agreement(prompt, probe.before.text)
    shown = prompt[:generation] + habits.header
    if not habits.header or habits.header in prompt[generation:] or not full.startswith(shown):
        return full, probe

    def without(text: str) -> str:
        return prompt[:generation] + text[len(shown) :] if text.startswith(shown) else text

    plain, other = (evolve(each, text=without(each.text)) for each in (probe.plain, probe.other))
    return without(full), evolve(probe, plain=plain, other=other)


def _answer_behind_header(habits: Habits, prompt: str, full: str, answer: Parted, probe: _Probe) -> str:
    """The answer in a text that does not begin with its prompt. Raises Unusable for another thought than the prompt's.

    The generation prompt is what `prompt` has beyond the messages before the answer; the scaffold is the end of it
    that `full` does not have: an empty thought, for example.
    """
    generation = agreement(prompt, probe.before.text)
    if generation == len(prompt):  # the template writes one whether it is asked for or not, or none here
        generation = _end_of_history(full, probe)
    if full.startswith(prompt[:generation]):
        start = min(agreement(prompt, full), _end_of_header(full, probe, generation))
        prompted = start
    else:  # the history is rewritten: find the end of the generation prompt
        history_end = _end_of_history(full, probe)
        header_end = _end_of_header(full, probe, history_end)
        start, length = _end_of_head(prompt[generation:], full, history_end, header_end)
        prompted = generation + length
    inside = min(max(_inside_tag(prompt, prompted), _inside_tag(full, start)), prompted - generation)
    scaffold, found = prompt[prompted - inside :], full[start - inside :].removeprefix(habits.header)
    if not scaffold.strip():
        return found[agreement(scaffold, found) :]
    if habits.leaves_open(scaffold) and not (answer.thought and habits.closes(found)):
        raise _no_thought(habits, prompt)
    if answer.thought and habits.closes(scaffold):
        raise _other_thought(habits, prompt)
    return found[_repeated(scaffold, found, habits) :]


def _no_thought(habits: Habits, prompt: str) -> Unusable:
    return Unusable(
        OTHER_THOUGHT,
        f"the prompt ends with {habits.last_thought(prompt)!r}, the answer has no reasoning; regenerate it, or set "
        "enable_thinking = false",
    )


def _other_thought(habits: Habits, prompt: str) -> Unusable:
    ends = f"the prompt ends with {habits.last_thought(prompt)!r}"
    return Unusable(OTHER_THOUGHT, f"{ends}, the answer has reasoning; set enable_thinking = true")


def _repeated(scaffold: str, found: str, habits: Habits) -> int:
    """The length of the end of a thought with which the scaffold ends and the answer begins, as DeepSeek V3.2's do."""
    lengths = range(min(len(scaffold), len(found)), 0, -1)
    return next((each for each in lengths if scaffold.endswith(found[:each]) and habits.closes(found[:each])), 0)


def _end_of_header(full: str, probe: _Probe, least: int) -> int:
    """The place in `full` where the answer's header ends. least: what the probes have in common with `full` at least.

    Raises Unusable if no probe has.
    """
    same = [agreement(full, each.text) for each in (probe.plain, probe.other) if not each.absent]
    ends = [end for end in same if end >= least]
    if not ends:
        raise Unusable(ANSWER_NOT_FOUND, "the template shows another answer in its place otherwise")
    return min(ends)


def _end_of_history(full: str, probe: _Probe) -> int:
    """The place in `full` behind the message before the answer; 0 if it is unknown."""
    if probe.mark not in probe.marked.text:
        return 0
    behind = probe.marked.text.rpartition(probe.mark)[2]
    return len(full) - len(behind) if full.endswith(behind) else 0


def _end_of_head(generation: str, full: str, start: int, end: int) -> tuple[int, int]:
    """The end, in full[start:end], of the longest head of the generation prompt there, and its length."""
    for length in range(len(generation), 0, -1):
        place = full.rfind(generation[:length], start, end)
        if place >= 0:
            return place + length, length
    return end, 0


def _inside_tag(text: str, place: int) -> int:
    """How many characters before the place a tag begins that ends behind it; 0 if none does."""
    around = TAG.finditer(text, max(0, place - LONGEST_TAG), place + LONGEST_TAG)
    return next((place - tag.start() for tag in around if tag.start() < place < tag.end()), 0)


def _learnt(answer: str, eos: Sequence[str]) -> tuple[int, int]:
    """The start and the end of the first EOS of an answer, at which a server stops; twice its length without one."""
    found = [(answer.find(each), -len(each)) for each in eos if each in answer]
    place, length = min(found, default=(len(answer), 0))
    return place, place - length


def check_shown(messages: Messages, tools: Tools) -> Renderings[None]:
    """Check that a template shows the tools and the results before an answer. Raises Unusable.

    messages: those before the answer, as the template takes them. A name or a result may be in a prompt for another
    reason, so they are replaced by marks, which must be in the rendering: those of tools before the first answer too.
    """
    marked, results = list(messages), {}
    for turn, message in enumerate(messages):
        if message["role"] == "tool" and any(text.strip() for text in texts_of(message)):
            results[turn] = MARK.format("turn", turn)
            marked[turn] = _with_text(message, results[turn])
    if not (tools or results):
        return
    marks = [MARK.format("tool", place) for place in range(len(tools))]
    named = [{**tool, "function": {**tool["function"], "name": mark}} for tool, mark in zip(tools, marks, strict=True)]
    first = next((turn for turn, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    before = dict.fromkeys((first, len(messages)))
    shown = yield [Rendering(marked[:end], prompt=True, tools=named) for end in before]
    for tool, mark in zip(tools, marks, strict=True):
        if not all(mark in prompt.text for prompt in shown):
            raise Unusable(TOOLS_NOT_SHOWN, f"the tool {tool['function']['name']} is not in the prompt")
    for turn, mark in results.items():
        if mark not in shown[-1].text:
            text = "".join(texts_of(messages[turn])).strip()
            raise Unusable(RESULTS_NOT_SHOWN, f"turn {turn + 1}: the result {text[:30]!r} is not in the prompt")


def _with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with one text in the place of its own."""
    others = [part for part in message["content"] if part["type"] != "text"]
    return {**message, "content": [*others, {"type": "text", "text": text}]}


def check_documents(documents: Documents, prompt: str, messages: Messages) -> None:
    """Check that a prompt shows the longest text of each document, besides its messages. Raises Unusable."""
    if not documents:
        return
    texts = [max(map(str.strip, strings_in(each, with_keys=False)), key=len, default="") for each in documents]
    others = [*chain(*map(texts_of, messages)), *texts]
    for text in filter(None, texts):
        if sum(map(prompt.count, _forms(text))) < sum(each.count(text) for each in others):
            raise Unusable(DOCUMENTS_NOT_SHOWN, f"the document {text[:30]!r} is not in the prompt")


def _forms(text: str) -> set[str]:
    """A text as it is, and as JSON writes it."""
    return {text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]}


def _check_shown(message: dict[str, Any], answer: Parted, shown: str, habits: Habits) -> None:
    """Check that all parts of an answer are in the text that is learnt. Raises Unusable, with the part's name."""
    lost = next(_lost(message, answer, shown, habits), None)
    if lost is not None:
        raise _changed(lost, shown)


def _lost(message: dict[str, Any], answer: Parted, shown: str, habits: Habits) -> Iterator[str]:
    thought = "" if habits.reasoning is None else answer.thought.strip()
    texts = [text.strip() for text in texts_of(answer.message)]

    def is_lost(part: str) -> bool:
        return bool(part) and shown.count(part) < sum(each.count(part) for each in (thought, *texts))

    if is_lost(thought):
        yield "the reasoning"
    yield from (f"the text {text[:30]!r}" for text in texts if is_lost(text))
    yield from _lost_calls(message, shown, [thought, *texts])


def check_calls(message: dict[str, Any], shown: str) -> None:
    """Check that the text of an answer shows its calls. Raises Unusable."""
    lost = next(_lost_calls(message, shown), None)
    if lost is not None:
        raise _changed(lost, shown)


def _changed(lost: str, shown: str) -> Unusable:
    return Unusable(ANSWER_CHANGED, f"{lost} is not shown: it became {shown[:60]!r}")


def _lost_calls(message: dict[str, Any], shown: str, others: Sequence[str] = ()) -> Iterator[str]:
    """The calls of an answer whose name, or a text of whose arguments, is not in the text that is shown.

    Each must be there as often as in all calls and in `others`, the texts that are shown beside them.
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    leaves = [leaf for function in functions for leaf in strings_in(function["arguments"], with_keys=False)]
    parts = [*others, *(function["name"] for function in functions), *leaves]

    def is_lost(part: str) -> bool:
        return sum(shown.count(form) for form in _forms(part)) < sum(each.count(part) for each in parts)

    for function in functions:
        if is_lost(function["name"]):
            yield f"the call {function['name']}"
        for leaf in strings_in(function["arguments"], with_keys=False):
            if leaf and is_lost(leaf):
                yield f"the argument {leaf[:30]!r} of the call {function['name']}"
