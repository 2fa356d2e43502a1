"""What a chat template does with reasoning and calls, found once by rendering conversations of private-use letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from ops.ingest.sample import END_OF_THOUGHT, THINK
from ops.tokenize_chat.kinds import TAG, Markup, opening_of_calls
from ops.tokenize_chat.rendering import agreement
from ops.tokenize_chat.template import Rendering, Renderings, Text

THOUGHT, WORDS, SAID = map(chr, range(0xF0000, 0xF0003))  # in no sample: probes are conversations of their own
KEYS = ("reasoning_content", "thinking", "reasoning")
IN_TEXT = "content"  # of a template that takes thoughts in the text of an answer
LONG_ID, SHORT_ID, OTHER_ID = "call_0123456789", "call00001", "call00002"
NAME = "look"
NEAR = 60  # characters of the end of a prompt
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


@frozen
class Habits:
    """What a template does.

    reasoning    the key of an answer in which it shows reasoning: one of KEYS, or IN_TEXT; None if it shows none
    thoughts     pairs of tags around a thought: those of the template, <think>, special tokens for thoughts, or words
    short_ids    whether it takes only ids of calls of 9 letters and digits
    markup       the texts around the parts of an answer
    header       what it writes before the answer to a first question, in the prompt and in history
    """

    reasoning: str | None
    thoughts: tuple[tuple[str, str], ...]
    short_ids: bool
    markup: Markup
    header: str

    def leaves_open(self, text: str) -> bool:
        """Whether a thought begins in the text and does not end there."""
        return any(text.rfind(opening) > text.rfind(closing) for opening, closing in self.thoughts)

    def closes(self, text: str) -> bool:
        """Whether a thought ends in the text."""
        return any(closing in text for _, closing in self.thoughts)

    def last_thought(self, prompt: str) -> str:
        """The end of a prompt, from the thought on that begins there, or else its last line."""
        opened = max(prompt.rfind(opening) for opening, _ in self.thoughts)
        return prompt[max(opened, prompt.rstrip().rfind("\n") + 1) if opened < len(prompt) - NEAR else opened :]

    def ends_open(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of a thought."""
        return any(prompt.rstrip().endswith(opening) for opening, _ in self.thoughts)

    def ends_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with the end of a thought."""
        return any(prompt.rstrip().endswith(closing) for _, closing in self.thoughts)

    def begins_empty(self, answer: str) -> bool:
        """Whether an answer begins with an empty thought, or with the end of one that its prompt opened."""
        bare = answer.lstrip()
        return any(
            bare.startswith(closing) or bare.removeprefix(opening).lstrip().startswith(closing)
            for opening, closing in self.thoughts
        )


def probe(thinks: bool, tags: Sequence[tuple[str, str]] = ()) -> Renderings[Habits]:
    """Find the habits of a template. thinks: whether it has the end of a thought. tags: special tokens for thoughts."""
    keys = (*KEYS, *((IN_TEXT,) if thinks else ()))
    asked, said = [_say("user")], _say("assistant", SAID)
    prompt, before, answered, *plain = yield [
        Rendering(asked, prompt=True, may_fail=True),
        Rendering(asked, may_fail=True),
        Rendering([*asked, said], may_fail=True),
        *(Rendering([*asked, with_thought(said, key)], may_fail=True) for key in keys),
    ]
    calls = [[*asked, with_thought(_call(""), key)] for key in keys]
    answers = [[*asked, answer] for answer in (said, _call(""), _call(SAID))]
    prompted = Rendering(asked, prompt=True, tools=[TOOL], may_fail=True)
    with_ids = [[*asked, _call("", given), _result(given), _say("assistant")] for given in (LONG_ID, SHORT_ID)]
    messages = (*calls, *answers, *with_ids)
    with_tools, *called = yield [prompted, *(Rendering(each, tools=[TOOL], may_fail=True) for each in messages)]
    reasoning, thoughts, shown = None, [(THINK, END_OF_THOUGHT), *tags], []
    for key, *texts in zip(keys, plain, called, strict=False):
        both = zip((prompt, with_tools), texts, strict=True)
        shown = [(before.text, text.text) for before, text in both if THOUGHT in text.text]
        if shown:
            reasoning = key
            thoughts += _tags(shown[0][1]) + _in_words(*shown[0])
            break
    long, short = called[-2:]
    pairs = tuple(dict.fromkeys(thoughts))
    markup = _markup(with_tools.text, shown, pairs, called[len(keys) : -len(with_ids)])
    header = prompt.text[agreement(prompt.text, before.text) : agreement(prompt.text, answered.text)]
    return Habits(reasoning, pairs, long.absent and not short.absent, markup, header)


@frozen
class Results:
    """What a template does with results of tools.

    shows_images   whether it shows their images
    by_call        whether it shows them in the order of their calls, whatever their own order is
    """

    shows_images: bool
    by_call: bool


def probe_results(image_token: str) -> Renderings[Results]:
    """Find what a template does with results. image_token: what it writes for an image."""
    asked, one, other = _say("user"), _call(""), _call("", OTHER_ID)
    both = {**one, "tool_calls": [*one["tool_calls"], *other["tool_calls"]]}
    last, first = _seen(OTHER_ID, WORDS), _seen(SHORT_ID, SAID)
    alone, turned = yield [
        Rendering(messages, tools=[TOOL], may_fail=True)
        for messages in ([asked, one, first], [_say("user", THOUGHT), both, last, first])
    ]
    return Results(
        shows_images=image_token in alone.text,
        by_call=WORDS in turned.text and 0 <= turned.text.find(SAID) < turned.text.find(WORDS),
    )


def _markup(
    prompt: str, shown: Sequence[tuple[str, str]], tags: Sequence[tuple[str, str]], answers: Sequence[Text]
) -> Markup:
    """The texts around the parts of an answer.

    prompt: the user's turn and tools with the generation prompt. shown: prompts, and renderings of an answer with a
    thought. tags: around a thought. answers: renderings of a text, of a call, and of both.
    """
    plain, called, both = (answer.text for answer in answers)
    beside = both.partition(SAID)[2] if SAID in both else None
    closing = (
        TAG.findall(both[both.find(NAME, agreement(prompt, both)) : both.find(SAID)]) if beside is not None else []
    )
    call = opening_of_calls(
        prompt, plain.partition(SAID)[0], called, beside, (NAME, SHORT_ID), closing[-1] if closing else ""
    )
    openings, closings = [opening for opening, _ in tags], [closing for _, closing in tags]
    for prompted, text in shown:
        before, _, behind = text.partition(THOUGHT)
        openings.append(before[agreement(prompted, before) :].strip())
        ends = [place for place in (behind.find(SAID), -1 if call is None else call.find(behind)) if place >= 0]
        closings += [behind[: min(ends)].strip()] if ends else []
    return Markup(_distinct(openings), _distinct(closings), call)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def around_turns() -> Renderings[list[str]]:
    """Render what stands around the turns of a conversation that asks for an answer."""
    conversations = [_say("user")], [_say("system"), _say("user")]
    shown = yield [Rendering(messages, prompt=True, may_fail=True) for messages in conversations]
    return [text.text for text in shown]


def _say(role: str, text: str = WORDS, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if text else [], **more}


def _call(text: str, call_id: str = SHORT_ID) -> dict[str, Any]:
    function = {"name": NAME, "arguments": {"at": "it"}}
    return _say("assistant", text, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def _result(call_id: str) -> dict[str, Any]:
    return _say("tool", tool_call_id=call_id, name=NAME)


def _seen(call_id: str, text: str) -> dict[str, Any]:
    result = _result(call_id)
    return {**result, "content": [{"type": "image"}, {"type": "text", "text": text}]}


def _tags(shown: str) -> list[tuple[str, str]]:
    before, _, behind = shown.partition(THOUGHT)
    opening, closing = TAG.findall(before), TAG.search(behind)
    return [(opening[-1], closing[0])] if opening and closing else []


def _in_words(prompt: str, shown: str) -> list[tuple[str, str]]:
    """The words with which only a prompt begins a thought, and those that end it in an answer, as of Apriel 1.6."""
    before, _, behind = shown.partition(THOUGHT)
    same = agreement(prompt, before)
    words, closing = prompt[same:].strip(), behind.partition(SAID)[0].strip()
    return [(words, closing)] if same == len(before) and words and closing and not TAG.search(words) else []


def with_thought(answer: dict[str, Any], key: str, thought: str = THOUGHT) -> dict[str, Any]:
    """An answer with its thought under a key of KEYS, or in its text."""
    if key != IN_TEXT:
        return {**answer, key: thought}
    parts = list(answer["content"])
    words = parts.pop(0)["text"] if parts and parts[0]["type"] == "text" else ""
    text = f"{THINK}\n{thought}\n{END_OF_THOUGHT}" + (f"\n\n{words}" if words else "")
    return {**answer, "content": [{"type": "text", "text": text}, *parts]}


@frozen
class Parted:
    """An answer with its thought apart, as `parted` makes it."""

    message: dict[str, Any]
    thought: str = ""


def parted(answer: dict[str, Any], reads_thoughts: bool) -> Parted:
    """An answer without its thought, and the thought.

    reads_thoughts: whether <think> in a text is a thought; else it stays part of the text.
    """
    thought = answer.get("reasoning_content", "")
    message = {key: value for key, value in answer.items() if key != "reasoning_content"}
    parts = answer["content"]
    if not thought.strip() and reads_thoughts and parts and END_OF_THOUGHT in parts[0].get("text", ""):
        thought, _, text = parts[0]["text"].rpartition(END_OF_THOUGHT)
        thought, text = thought.lstrip().removeprefix(THINK).strip("\n"), text.lstrip("\n")
        message["content"] = [{"type": "text", "text": text}, *parts[1:]]
    return Parted(message, thought if thought.strip() else "")
