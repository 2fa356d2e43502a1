"""Turns of every form with calls of tools, their results and reasoning, as one form: `Said`.

FORMS is the table: how a turn of a form is recognised, and the function that reads it. Calls and results are then
matched (`matched`). Roles of results and calls: ops/ingest/row_values.py.

    OpenAI          `tool_calls` of an answer; role tool
    OpenAI, old     `function_call` of an answer; role function, which names the function
    LLaMA-Factory   `from` function_call, whose value is a call or a list of them; observation
    ms-swift        roles tool_call, one a turn, and tool_response; they belong to the answer's text before them
    Hermes          <tool_call>{...}</tool_call> in an answer behind its thought, also with Python's quotes;
                    <tool_response> in a result or, as Qwen's templates write it, in the user's turn behind calls
    Anthropic       parts tool_use, tool_result and thinking
    reasoning       reasoning_content, reasoning or thinking of an answer
    both            calls or a thought in the text of an answer that has them under a key too, or calls in turns of
                    their own: one copy is left out
    what is learnt  weight (OpenAI), loss (ms-swift), train or training (axolotl), loss_weight (LLaMA-Factory) of an
                    answer

Drop reasons:

    a tool call is not JSON             the whole of it, in a text
    the arguments of a tool call are not JSON, ... are not an object
    a tool call without arguments       but with other keys, which may hold them
    a tool call has no name, a tool that is no function
    a tool call outside an answer       in a user's turn
    two tool calls of a turn have the same id, more than 1,000 tool calls in a turn
    a tool result without a call, a tool result for no open call, tool calls without a result
    a tool result is not JSON
    redacted thinking                   which nobody can read
    other calls, another thought in the text of an answer than under its key
    another weight of an answer than 0 and 1
    an answer of which only a part is learnt
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import evolve, frozen

from dsl.errors import on_one_line, shortened
from ops.ingest.op import CallIds
from ops.ingest.row_values import (
    CALL_PART,
    CALL_ROLES,
    INVALID,
    INVALID_TEXT,
    LEARNING,
    REASONING,
    RESULT_PART,
    RESULT_ROLES,
    TURN_TEXTS,
    content_parts,
    first_value,
    is_none,
    json_fault,
    parsed,
    part_kind,
    turn_role,
)
from ops.ingest.sample import END_OF_THOUGHT, THINK, ToolCall
from ops.ingest.tools import NO_FUNCTION, literal, quoted
from ops.lib.data.files import shown_json
from ops.lib.data.sample_account import Unusable

MOST_CALLS = 1000  # in a turn, of which each result searches its own
CALL_NOT_JSON = "a tool call is not JSON"
ARGUMENTS_NOT_JSON = "the arguments of a tool call are not JSON"
ARGUMENTS_NO_OBJECT = "the arguments of a tool call are not an object"
ARGUMENTS_ELSEWHERE = "a tool call without arguments"
NAMELESS = "a tool call has no name"
UNKNOWN_ROLE = "unknown role"
OUTSIDE_ANSWER = "a tool call outside an answer"
SAME_ID = "two tool calls of a turn have the same id"
NO_CALL, NOT_OPEN = "a tool result without a call", "a tool result for no open call"
NO_RESULT = "tool calls without a result"
TOO_MANY_CALLS = f"more than {MOST_CALLS:,} tool calls in a turn"
RESULT_NOT_JSON = "a tool result is not JSON"
REDACTED = "redacted thinking"
OTHER_CALLS_IN_TEXT = "other calls in the text of an answer than under its key"
OTHER_THOUGHT = "another thought in the text of an answer than under its key"
OTHER_WEIGHT, PARTLY_LEARNT = (
    "another weight of an answer than 0 and 1",
    "an answer of which only a part is learnt",
)

ROLE_NAMES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt"), "assistant"),
}
ARGUMENTS = ("arguments", "parameters", "input")  # of a call: Llama writes the second, Anthropic the third
OF_CALL = ("id", "type", "index", "name", "function", *ARGUMENTS)
CALL_TAGS, RESULT_TAGS = ("<tool_call>", "</tool_call>"), ("<tool_response>", "</tool_response>")
THOUGHTS = ("thinking", "redacted_thinking")  # parts of Anthropic
MADE_ID = "call{:05}"  # 9 characters, which templates of Mistral ask for
KIMI_ID = "functions.{}:{}"  # the function, and the call's place in the conversation, from 0 on

TurnObject = dict[str, Any]


@frozen
class Call:
    """A call as a row has it. id: None where the row has none."""

    id: str | None
    name: str
    arguments: dict[str, Any]


@frozen
class Said:
    """A turn in the one form, before its images have places.

    role        system, user, assistant or tool
    parts       of the content, as the row has them
    calls       of an answer; their ids are those of the row before `matched`, and differ behind it
    call_id     of a result: the id of its call, None where the row has none, before `matched`
    name        of a result: the function's
    joins       whether it belongs to an answer directly before it
    from_text   how many of the calls, from the first on, its text has
    number      of the turn in its row, from 1 on
    is_learnt   whether an answer is learnt, by a mark of its own
    """

    role: str
    parts: tuple[Any, ...] = ()
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    joins: bool = False
    from_text: int = 0
    number: int = 0
    is_learnt: bool = True

    @property
    def may_be_empty(self) -> bool:
        """Whether the turn says something without a text: a result, or an answer that calls."""
        return self.role == "tool" or bool(self.calls)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of a turn behind `matched`."""
        return tuple(ToolCall(str(call.id), call.name, call.arguments) for call in self.calls)


@frozen
class Form:
    """A form of turns: how one is recognised, and what it says."""

    name: str
    recognised: Callable[[TurnObject], bool]
    read: Callable[[TurnObject], Iterable[Said]]


def said(turns: Sequence[TurnObject], call_ids: CallIds = "given") -> list[Said]:
    """What the turns of a row say, calls and results matched. Raises Unusable, with the number of the turn."""
    found: list[Said] = []
    for number, turn in enumerate(turns, start=1):
        if _is_rendered_result(turn) and _follows_calls(found):
            turn = {"role": RESULT_ROLES[0], "content": own_text(turn)}
        form = next((form for form in FORMS if form.recognised(turn)), PLAIN)
        try:
            found += [
                evolve(each, number=number, is_learnt=each.role != "assistant" or _is_learnt(turn))
                for each in form.read(turn)
            ]
        except Unusable as fault:
            raise _of_turn(number, fault.reason, fault.detail) from fault
    return matched([_once(turn) for turn in _joined(found)], call_ids)


def _once(turn: Said) -> Said:
    """A turn whose text does not repeat its reasoning and calls, which templates would show twice.

    Raises Unusable where the text has others.
    """
    turn = _without_repeated_calls(turn)
    text = own_text({"content": list(turn.parts)})
    if turn.role != "assistant" or not text:
        return turn
    rest = _without_thought(text, turn) if turn.reasoning and turn.reasoning.strip() else text
    if turn.calls:
        rest = _without_calls(rest, turn)
    return turn if rest == text else evolve(turn, parts=_text(rest))


def _without_repeated_calls(turn: Said) -> Said:
    """An answer whose text has calls without them, if the turns behind it that belong to it have the same."""
    in_text, behind = turn.calls[: turn.from_text], turn.calls[turn.from_text :]
    return evolve(turn, calls=behind, from_text=0) if behind and _same(in_text, behind) else turn


def _same(some: Sequence[Call], others: Sequence[Call]) -> bool:
    return [(call.name, call.arguments) for call in some] == [(call.name, call.arguments) for call in others]


def _without_thought(text: str, turn: Said) -> str:
    """The text of an answer without a copy of its reasoning, behind <think> or as what a generation prompt opened."""
    opened, thought = text.lstrip().removeprefix(THINK), str(turn.reasoning).strip()
    behind = opened.lstrip().removeprefix(thought).lstrip()
    if opened.lstrip().startswith(thought) and behind.startswith(END_OF_THOUGHT):
        return behind.removeprefix(END_OF_THOUGHT).lstrip()
    before, end, _ = opened.partition(END_OF_THOUGHT)
    if end and (opened != text.lstrip() or THINK not in before):  # else an answer that speaks of the tags
        raise _of_turn(turn.number, OTHER_THOUGHT, _shown(before.strip()))
    return text


def _without_calls(text: str, turn: Said) -> str:
    """The text of an answer without a copy of its calls."""
    rest, bodies = _tagged(text)
    try:
        copies = [_call(_json_call(body, python=True)) for body in bodies]
    except Unusable as fault:
        raise _of_turn(turn.number, fault.reason, fault.detail) from fault
    if not copies:
        return text
    if not _same(copies, turn.calls):
        raise _of_turn(turn.number, OTHER_CALLS_IN_TEXT, _shown(bodies[0]))
    return rest.strip()


def _of_turn(number: int, reason: str, detail: str = "") -> Unusable:
    return Unusable(reason, ", ".join(filter(None, (f"turn {number}", detail))))


def _follows_calls(turns: Sequence[Said]) -> bool:
    """Whether the last turn but results calls tools."""
    last = next((turn for turn in reversed(turns) if turn.role != "tool"), None)
    return last is not None and bool(last.calls)


def _joined(turns: Iterable[Said]) -> list[Said]:
    """The turns, calls in turns of their own joined with the answer directly before them."""
    joined: list[Said] = []
    for turn in turns:
        before = joined[-1] if joined else None
        if turn.joins and before is not None and before.role == "assistant":
            if turn.is_learnt != before.is_learnt:
                raise _of_turn(turn.number, PARTLY_LEARNT)
            joined[-1] = evolve(
                before,
                parts=(*before.parts, *turn.parts),
                calls=(*before.calls, *turn.calls),
                reasoning="\n".join(filter(None, (before.reasoning, turn.reasoning))) or None,
            )
        else:
            joined.append(turn)
    return joined


def matched(turns: Sequence[Said], call_ids: CallIds = "given") -> list[Said]:
    """The turns with an id for every call, and its call's id and name for every result. Raises Unusable.

    The ids are those given, if all calls have one and they differ; else call00001, call00002, ...; with "kimi",
    functions.NAME:0, functions.NAME:1, ... A result without an id, or where no call has one, is that of the first open
    call of its name, or else of the first open call.
    """
    if not any(turn.calls or turn.role == "tool" for turn in turns):
        return list(turns)
    calls: list[Call] = []
    open_calls: dict[int, Call] = {}  # by place among all calls
    asked = turns[0]  # the turn of these calls
    answered: dict[int, int] = {}  # turn -> place of its call
    for place, turn in enumerate(turns):
        if turn.role == "tool":
            answered[place] = _called(turn, open_calls)
            del open_calls[answered[place]]
            continue
        _check_answered(asked, open_calls)
        ids = [call.id for call in turn.calls if call.id is not None]
        if len(set(ids)) < len(ids):
            raise _of_turn(turn.number, SAME_ID, quoted(Counter(ids).most_common(1)[0][0]))
        if len(turn.calls) > MOST_CALLS:
            raise _of_turn(turn.number, TOO_MANY_CALLS, f"{len(turn.calls)}")
        asked, open_calls = turn, dict(enumerate(turn.calls, start=len(calls)))
        calls += turn.calls
    if turns[-1].role == "tool":
        _check_answered(asked, open_calls)
    ids_by_place = _ids(calls, call_ids)
    named = iter([evolve(call, id=own) for call, own in zip(calls, ids_by_place, strict=True)])
    return [
        evolve(turn, call_id=ids_by_place[answered[place]], name=calls[answered[place]].name)
        if turn.role == "tool"
        else evolve(turn, calls=tuple(next(named) for _ in turn.calls))
        for place, turn in enumerate(turns)
    ]


def _ids(calls: Sequence[Call], call_ids: CallIds) -> list[str]:
    """The id of each call of a conversation."""
    if call_ids == "kimi":
        return [KIMI_ID.format(call.name, place) for place, call in enumerate(calls)]
    given = [call.id for call in calls if call.id is not None]
    if len(given) == len(calls) == len(set(given)):
        return given
    return [MADE_ID.format(place) for place in range(1, len(calls) + 1)]


def _check_answered(asked: Said, open_calls: dict[int, Call]) -> None:
    if open_calls:
        raise _of_turn(asked.number, NO_RESULT, f"{len(open_calls)} of {len(asked.calls)}")


def _called(result: Said, open_calls: dict[int, Call]) -> int:
    """The place of the open call that a result is for. Raises Unusable."""
    if not open_calls:
        raise _of_turn(result.number, NO_CALL, "" if result.call_id is None else quoted(result.call_id))
    if result.call_id is not None and any(call.id is not None for call in open_calls.values()):
        found = next((place for place, call in open_calls.items() if call.id == result.call_id), None)
        if found is None:
            shown = f"a tool result for {quoted(result.call_id)}, which is no open call"
            raise _of_turn(result.number, NOT_OPEN, shown)
        return found
    named = (place for place, call in open_calls.items() if call.name == result.name)
    return next(named, next(iter(open_calls)))


def _has_calls(turn: TurnObject) -> bool:
    return turn.get("tool_calls") is not None and not is_none(turn["tool_calls"])


def _openai(turn: TurnObject) -> Iterable[Said]:
    calls = tuple(_call(call) for call in turn["tool_calls"] if not is_none(call))
    return [_answer(turn, _parts(turn), calls)]


def _has_function_call(turn: TurnObject) -> bool:
    return turn.get("function_call") is not None and not is_none(turn["function_call"])


def _old_openai(turn: TurnObject) -> Iterable[Said]:
    return [_answer(turn, _parts(turn), (_call({**turn["function_call"], "id": None}),))]


def _answer(turn: TurnObject, parts: Iterable[Any], calls: tuple[Call, ...]) -> Said:
    if ROLE_NAMES.get(turn_role(turn)) != "assistant":
        raise Unusable(OUTSIDE_ANSWER, f'role "{turn_role(turn)}"')
    return Said("assistant", tuple(parts), _reasoning(turn), calls)


def _is_call(turn: TurnObject) -> bool:
    return turn_role(turn) in CALL_ROLES


def _calls_alone(turn: TurnObject) -> Iterable[Said]:
    """A turn that is a call or a list of them, perhaps as JSON behind a thought; none for an empty list."""
    value, thought = first_value(turn, TURN_TEXTS), ""
    if isinstance(value, str):
        if value.lstrip().startswith(THINK) and END_OF_THOUGHT in value:
            head, end, value = value.partition(END_OF_THOUGHT)
            thought = head + end
        value = _json_call(value)
    calls = tuple(_call(call) for call in (value if isinstance(value, list) else [value]))
    parts = _text(thought) if thought else ()
    return [Said("assistant", parts, _reasoning(turn), calls, joins=True)] if calls else []


def _is_result(turn: TurnObject) -> bool:
    return turn_role(turn) in RESULT_ROLES


def _results(turn: TurnObject) -> Iterable[Said]:
    """A result, or several in one turn, between <tool_response> tags or joined by them as LLaMA-Factory does."""
    call_id = _id(turn.get("tool_call_id"))
    name = turn["name"] if isinstance(turn.get("name"), str) else None
    if parts := content_parts(turn):
        return [Said("tool", tuple(parts), call_id=call_id, name=name)]
    texts = _between(_result_text(first_value(turn, TURN_TEXTS)))
    return [Said("tool", _text(text), call_id=call_id if len(texts) == 1 else None, name=name) for text in texts]


def _is_rendered_result(turn: TurnObject) -> bool:
    """Whether a user's turn is nothing but results between tags."""
    if ROLE_NAMES.get(turn_role(turn)) != "user":
        return False
    text = own_text(turn).strip()
    return text.startswith(RESULT_TAGS[0]) and text.endswith(RESULT_TAGS[1]) and _between(text) != [text]


def user_turn(result: TurnObject) -> TurnObject:
    """A result as a turn of the user's."""
    return {"role": "user", "content": content_parts(result) or _result_text(first_value(result, TURN_TEXTS))}


def _result_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if fault := json_fault(value):
        raise Unusable(INVALID) if fault == INVALID_TEXT else Unusable(RESULT_NOT_JSON, fault)
    return json.dumps(value, ensure_ascii=False)


def _between(text: str) -> list[str]:
    """The texts between <tool_response> tags, of which the first and the last may be left out; or the text itself."""
    opening, closing = RESULT_TAGS
    pieces = text.split(closing)
    bodies = [piece.strip().removeprefix(opening).strip() for piece in pieces]
    if not bodies[-1] and len(bodies) > 1:
        bodies, pieces = bodies[:-1], pieces[:-1]
    is_marked = all(piece.lstrip().startswith(opening) for piece in pieces[1:]) and (
        len(pieces) > 1 or text.lstrip().startswith(opening)
    )
    return bodies if is_marked and not any(opening in body for body in bodies) else [text]


def _is_anthropic(turn: TurnObject) -> bool:
    return any(part_kind(part) in (CALL_PART, RESULT_PART, *THOUGHTS) for part in content_parts(turn))


def _anthropic(turn: TurnObject) -> Iterable[Said]:
    """The results of a turn before the rest of it; thoughts joined by line breaks."""
    by_kind: dict[str, list[Any]] = {}
    for part in content_parts(turn):
        kind = part_kind(part)
        by_kind.setdefault(kind if kind in (CALL_PART, RESULT_PART, *THOUGHTS) else "", []).append(part)
    if "redacted_thinking" in by_kind:
        raise Unusable(REDACTED)
    results = [result for part in by_kind.get(RESULT_PART, ()) for result in _results(result_turn(part))]
    rest, thoughts = by_kind.get("", []), [str(part["thinking"]) for part in by_kind.get("thinking", ())]
    calls = tuple(_call({**part, "type": None}) for part in by_kind.get(CALL_PART, ()))
    if calls or thoughts:
        answer = _answer(turn, rest, calls)
        return [*results, evolve(answer, reasoning="\n".join(filter(None, thoughts)) or answer.reasoning)]
    return [*results, *(_plain({**turn, "content": rest}) if rest else ())]


def result_turn(part: dict[str, Any]) -> TurnObject:
    """A result that is a part of Anthropic's as a turn of its own."""
    return {"role": "tool", "content": part.get("content"), "tool_call_id": part.get("tool_use_id")}


def _is_hermes(turn: TurnObject) -> bool:
    text = own_text(turn)
    return CALL_TAGS[0] in text and ROLE_NAMES.get(turn_role(turn)) == "assistant" and bool(_tagged(text)[1])


def _hermes(turn: TurnObject) -> Iterable[Said]:
    rest, bodies = _tagged(own_text(turn))
    calls = tuple(_call(_json_call(body, python=True)) for body in bodies)
    return [evolve(_answer(turn, _text(rest.strip()), calls), from_text=len(calls))]


def own_text(turn: TurnObject) -> str:
    """The text of a turn without images; empty for one with other parts."""
    content = first_value(turn, TURN_TEXTS)
    if isinstance(content, list) and all(part_kind(part) == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    return content if isinstance(content, str) else ""


def _tagged(text: str) -> tuple[str, list[str]]:
    """A text without its tagged calls, and these; what is between tags but no object stays, and so does a thought."""
    opening, closing = CALL_TAGS
    thought, end, words = text.rpartition(END_OF_THOUGHT)
    rest, *pieces = words.split(opening)
    bodies: list[str] = []
    for piece in pieces:
        body, closed, after = piece.partition(closing)
        is_object = bool(closed) and body.strip().startswith("{")
        bodies += [body.strip()] if is_object else []
        rest += after if is_object else opening + piece
    return thought + end + rest, bodies


def _plain(turn: TurnObject) -> Iterable[Said]:
    name = turn_role(turn)
    if name not in ROLE_NAMES:
        raise Unusable(UNKNOWN_ROLE, f'"{name}"')
    return [Said(ROLE_NAMES[name], _parts(turn), _reasoning(turn))]


PLAIN = Form("a text", lambda turn: True, _plain)
FORMS = (
    Form("OpenAI", _has_calls, _openai),
    Form("OpenAI, old", _has_function_call, _old_openai),
    Form("LLaMA-Factory, ms-swift", _is_call, _calls_alone),
    Form("results of all but Anthropic", _is_result, _results),
    Form("Anthropic", _is_anthropic, _anthropic),
    Form("Hermes", _is_hermes, _hermes),
)


def _parts(turn: TurnObject) -> tuple[Any, ...]:
    content = first_value(turn, TURN_TEXTS) or ""
    return _text(content) if isinstance(content, str) else tuple(content)


def _text(text: str) -> tuple[Any, ...]:
    return ({"type": "text", "text": text},)


def _reasoning(turn: TurnObject) -> str | None:
    return next((turn[name] for name in REASONING if turn.get(name) and isinstance(turn[name], str)), None)


def _json_call(text: str, python: bool = False) -> Any:
    """The call in a JSON text, or a list of them. python: also with Python's quotes. Raises Unusable."""
    try:
        return parsed(text)
    except ValueError:
        value = literal(text) if python else None
        if value is None:
            raise Unusable(CALL_NOT_JSON, _shown(text)) from None
        return value


def _call(call: Any) -> Call:
    """A call of any form: {"id", "function": {"name", "arguments"}}, or name and arguments in the call itself."""
    if not isinstance(call, dict):
        raise Unusable(NAMELESS, _shown(call))
    function = call["function"] if isinstance(call.get("function"), dict) else call
    if function is call and call.get("type") not in (None, "function"):
        raise Unusable(NO_FUNCTION, quoted(call["type"]))
    name = function.get("name")
    if not (isinstance(name, str) and name.strip()):
        raise Unusable(NAMELESS)
    return Call(_id(call.get("id")), name, _arguments(_given_arguments({**call, **function}), name))


def _given_arguments(call: dict[str, Any]) -> Any:
    """The arguments of a call by any of their keys; None for a call without any. Raises Unusable for other keys."""
    given = first_value(call, ARGUMENTS)
    others = [key for key, value in call.items() if key not in OF_CALL and not is_none(value)]
    if given is None and others:
        raise Unusable(ARGUMENTS_ELSEWHERE, f"{call['name']}: other keys are {', '.join(map(quoted, others))}")
    return given


def _arguments(value: Any, name: str) -> dict[str, Any]:
    """The arguments of a call, an object or its JSON; a missing or empty value is an empty object."""
    if isinstance(value, str):
        try:
            value = parsed(value) if value.strip() else None
        except ValueError:
            raise Unusable(ARGUMENTS_NOT_JSON, f"{name}: {_shown(value)}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Unusable(ARGUMENTS_NO_OBJECT, f"{name}: {_shown(value)}")
    if fault := json_fault([value, name]):
        raise (Unusable(INVALID, name) if fault == INVALID_TEXT else Unusable(ARGUMENTS_NOT_JSON, f"{name}: {fault}"))
    return value


def _is_learnt(answer: TurnObject) -> bool:
    """Whether an answer is learnt: not if a mark of its own says so. Raises Unusable for other weights than 0 and 1."""
    marks = {key: answer[key] for key in LEARNING if not is_none(answer.get(key))}
    for key, value in marks.items():
        if value not in (0, 1):
            raise Unusable(OTHER_WEIGHT, f"{quoted(key)} is {shown_json(value)}")
    return all(marks.values())


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "" else None


def _shown(value: Any) -> str:
    return shortened(on_one_line(value if isinstance(value, str) else shown_json(value)))
