"""A row of any supported form as a sample, and the mistakes in its form.

    {"id": "a1", "split": "train", "image": "cats/7.png",
     "conversations": [{"role": "user", "text": "..."}, {"role": "assistant", "text": "..."}]}

The turns of a row have one of these forms:

    messages, or conversations          the turns themselves, whatever other columns there are
                                        (ops/ingest/turn_forms.py has those with calls of tools)
    prompt, and perhaps completion      each a text, or a list of turns; or response in the place of completion
    instruction, input and output       texts; an input follows the instruction on a line of its own; or response in
                                        the place of output, context in that of input (Dolly)
    question and answer                 texts

The reasoning of an answer that is a text may be a text of its own beside it: reasoning_content, reasoning or thinking.
Rows of other columns become such before (ops/ingest/row_forms.py), and their tools a list (ops/ingest/tools.py).
They may have `documents` (ops/ingest/documents.py).

An answer that is null or empty is none: the row is a prompt. A turn has
`role` (or `from`: human, gpt) and `content` (or `text`, `value`). A content is a text, in which <image> means the next
of the row's images, or a list of parts: {"type": "text", "text"}, {"type": "image_url", "image_url": {"url"}},
{"type": "image", "image"}, and Anthropic's {"type": "image", "source"}; an image part without its own image means the
next of the row's images. `image` and
`images` are one image or a list (ops/ingest/image_values.py); without placeholders they are placed at the start of the
first user turn. `id`, `split`, `system`, `label`, the correct answer, and `category`, by which tau is reported, are
optional.

Texts are unchanged, with three exceptions, which are removed: the line breaks between a turn's text and the images at
its ends ("<image>\nWhat?", "What?\n<image>"), since chat templates join images and texts; texts of only white
space at a turn's ends; and the white space after an answer, before which the target would end.

`row_mistake` finds mistakes of the file, which end the reading. A well-formed sample that cannot be used is dropped,
for a reason of ops/ingest/image_values.py or one of these:

    no turns, empty text, no answer, starts with the assistant
    invalid text                    half a surrogate pair, which is not valid UTF-8
    unknown role                    other than system, user, assistant, tool and their other names
    unknown content part            neither a text nor an image
    placeholders and images differ  in number, or a placeholder names a missing image
    image in an answer              which no target can generate
    tool calls without tools        of the row, its system turn or default_tools
    python calls in a text          [name(key="value")], of a tool of the row or its system turn
    calls in a text                 of a row with tools, as other models write them (OTHER_CALLS), or as bare JSON
    channels of gpt-oss in a text   which its chat template refuses
    no answer is learnt             by their marks
    only some of the earlier answers are learnt, and a later one
    tools, documents are not JSON   but hold values that JSON lacks, or are nested too deeply
    videos are not supported        and audio; the reasons of calls are in ops/ingest/turn_forms.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from typing import Any

from attrs import frozen

from dsl.errors import did_you_mean
from ops.ingest.documents import ARGUMENTS as OF_TEMPLATE
from ops.ingest.documents import KEY as DOCUMENTS
from ops.ingest.documents import OTHERS as OTHER_DOCUMENTS
from ops.ingest.documents import normal_documents
from ops.ingest.image_values import AUDIO, IMAGE_NAMES, VIDEO, ImageFinder, is_image_value
from ops.ingest.op import CallIds, ToolSyntax
from ops.ingest.row_values import (
    CALL_ROLES,
    IMAGE_KINDS,
    INVALID,
    INVALID_TEXT,
    REASONING,
    RESULT_PART,
    RESULT_ROLES,
    TURN_TEXTS,
    content_parts,
    first_value,
    is_none,
    is_valid_text,
    part_image,
    part_kind,
    turn_role,
)
from ops.ingest.sample import END_OF_THOUGHT, IMAGE, DroppedSample, RawSample, Turn, with_leading_images
from ops.ingest.tools import NO_FUNCTION, TOOL_KEYS, Tool, chosen_tool, normal_tools, quoted, tools_in
from ops.ingest.turn_forms import ARGUMENTS, ROLE_NAMES, Said, own_text, result_turn, said, user_turn
from ops.lib.data.files import shown_json
from ops.lib.data.json_lines import json_kind
from ops.lib.data.sample_account import SPLITS, Unusable

TURNS = ("messages", "conversations")
# The keys of the answer to each question, of which a row gives one.
ANSWERS = {"prompt": ("completion", "response"), "instruction": ("output", "response"), "question": ("answer",)}
ANSWER_KEYS = tuple(dict.fromkeys(chain.from_iterable(ANSWERS.values())))
INPUTS = ("input", "context")  # of an instruction
KEYS = (
    *("id", *TURNS, *ANSWERS, *ANSWER_KEYS, *INPUTS, *TOOL_KEYS, DOCUMENTS),
    *("image", "images", "split", "system", "label", "category"),
)
SWITCH = ("on", "off")  # what Nemotron's column of reasoning says
NO_TURNS = 'no list "messages" (or "conversations")'
OTHER_FORMS = ', "prompt", "instruction" with "output" (or "response"), or "question" with "answer"'
LONGEST_ID = 1000  # characters; the ids of all samples are in memory
LONGEST_TOPIC = 200  # characters


def row_mistake(row: Any) -> str:
    """The mistake in the form of a row, or an empty string."""
    if not isinstance(row, dict):
        return f"expected an object, got {json_kind(row)}"
    if mistake := turns_mistake(row):
        return mistake
    for key in row:
        if mistake := _key_mistake(row, key):
            return mistake
    for key in ("image", "images"):
        if not all(is_image_value(value) for value in _as_list(row.get(key))):
            return f'"{key}" must be a path, bytes, base64 or null, or a list of them'
    if _as_list(row.get("image")) and _as_list(row.get("images")):
        return 'both "image" and "images": give one of them'
    if not (isinstance(row.get("system") or "", str) or _is_text(row["system"])):
        return '"system" must be a string or a list of text parts'
    if row.get("split") not in (None, *SPLITS):
        return f'"split" must be one of {", ".join(SPLITS)}, got {shown_json(row["split"])}'
    return _id_mistake(row.get("id"))


def _id_mistake(sample_id: Any) -> str:
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int, type(None))):
        return f'"id" must be a string or an integer, got {shown_json(sample_id)}'
    text = str(sample_id)
    if len(text) > LONGEST_ID:
        return f'"id" has {len(text)} characters, more than {LONGEST_ID}'
    return "" if is_valid_text(text) else f'"id" contains {INVALID_TEXT}'


def turn_list(row: dict[str, Any]) -> list[Any]:
    """All turns of a row without a mistake, in one list."""
    return [turn for _, turns in _keyed_turns(row) for turn in turns]


def row_images(row: dict[str, Any]) -> list[Any]:
    """The images in the columns `image` or `images` of a row."""
    return _as_list(row.get("images")) or _as_list(row.get("image"))


def _questions(row: dict[str, Any]) -> list[str]:
    """The question keys of a row that also has a matching answer column; a prompt needs none. See ANSWERS."""
    return [
        key
        for key, answers in ANSWERS.items()
        if row.get(key) is not None and (key == "prompt" or any(name in row for name in answers))
    ]


def turns_mistake(row: dict[str, Any]) -> str:
    """The mistake in the turns of a row, or an empty string."""
    asked = _questions(row)
    if first_value(row, TURNS) is None:
        if len(asked) > 1:
            return f'both "{asked[0]}" and "{asked[1]}": remove the columns of one form'
        if not asked:
            return f"{NO_TURNS}{_meant_turns(row) or OTHER_FORMS}"
        if mistake := _question_mistake(row, asked[0]):
            return mistake
    for key, turns in _keyed_turns(row):
        if not isinstance(turns, list):
            return f"{NO_TURNS}{_meant_turns(row)}"
        for place, turn in enumerate(turns):
            if mistake := _turn_mistake(turn):
                return f"{key}[{place}]{mistake}"
    return ""


def _question_mistake(row: dict[str, Any], key: str) -> str:
    """The mistake in the values of a question and its answer."""
    is_prompt = key == "prompt"
    wanted = "a text or a list of turns" if is_prompt else "a text"
    alternatives = (ANSWERS[key], _inputs(key))
    for names in alternatives:
        given = [name for name in names if row.get(name)]
        if len(given) > 1:
            return f'both "{given[0]}" and "{given[1]}": give one of them'
    for name in (key, *chain.from_iterable(alternatives)):
        value = row.get(name)
        if not (isinstance(value, (str, type(None))) or (is_prompt and isinstance(_turns_of(value), list))):
            return f'"{name}" must be {wanted}, got {json_kind(value)}'
    return ""


def _keyed_turns(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of a key and the list of its turns, in order; or the key's own value if that is no list of turns."""
    for key in TURNS:
        if row.get(key) is not None:
            yield key, _turns_of(row[key])
            return
    for key in _questions(row):
        more = next((row[name] for name in _inputs(key) if row.get(name)), "")
        yield key, _said("user", f"{row[key]}\n{more}" if more else row[key])
        for name in ANSWERS[key]:
            if row.get(name):
                yield name, _said("assistant", row[name], **_thought(row))


def _inputs(question: str) -> tuple[str, ...]:
    return INPUTS if question == "instruction" else ()


def _said(role: str, value: Any, **more: Any) -> Any:
    """A text as a list of one turn, with more of its keys; a list of turns is unchanged."""
    return [{"role": role, "content": value, **more}] if isinstance(value, str) else _turns_of(value)


def _thought(row: dict[str, Any]) -> dict[str, str]:
    """The reasoning that a row has in a column, beside a text as its answer; empty for none."""
    return next(({key: row[key]} for key in REASONING if _is_thought(row.get(key))), {})


def _is_thought(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value not in SWITCH


def _stray_thoughts(row: dict[str, Any]) -> list[str]:
    """The columns of reasoning that become that of no answer."""
    answers = [] if first_value(row, TURNS) is not None else [name for key in _questions(row) for name in ANSWERS[key]]
    used = _thought(row) if any(row.get(name) and isinstance(row[name], str) for name in answers) else {}
    texts = [value.strip() for value in used.values()]
    return [
        key
        for key in REASONING
        if (_is_thought(row.get(key)) and row[key].strip() not in texts)
        or (isinstance(row.get(key), list) and not is_none(row[key]))
    ]


def _turns_of(value: Any) -> Any:
    """The rows of an older Hugging Face `Sequence` ({"from": [...], "value": [...]}); other values are unchanged."""
    if not (isinstance(value, dict) and all(isinstance(column, list) for column in value.values())):
        return value
    if len({len(column) for column in value.values()}) != 1:
        return value
    return [dict(zip(value, values, strict=True)) for values in zip(*value.values(), strict=True)]


def _key_mistake(row: dict[str, Any], key: str) -> str:
    """The mistake in a misspelt key, which would lose data; "" for other columns, such as image_id or idx.

    A key is misspelt if it is one typing slip away from a key that is missing, and its value fits that key. A less
    similar key counts too if the value decides. The turns always count as given.
    """
    values = _as_list(row[key])
    if key in KEYS or not values:
        return ""
    first, is_text = values[0], isinstance(row[key], str)
    questions = _questions(row) if first_value(row, TURNS) is None else []
    answers = [name for question in questions for name in ANSWERS[question]]
    inputs = [name for question in questions for name in _inputs(question)]
    slips = [
        *(("image", "images") if is_image_value(first) and not row_images(row) else ()),
        *(name for name in ("split", "system", "label", *answers, *inputs) if is_text and row.get(name) is None),
    ]
    similar = [
        *(("image", "images") if is_image(first) and not row_images(row) else ()),
        *(("split",) if first in SPLITS and row.get("split") is None else ()),
        *(("system",) if isinstance(first, str) and row.get("system") is None else ()),
        *(("completion",) if questions == ["prompt"] and first_value(row, answers) is None else ()),
    ]
    slip = next((name for name in slips if _is_slip(key.lower(), name)), None)
    meant = f'did you mean "{slip}"?' if slip else did_you_mean(key, similar)
    return f'unknown key "{key}" ({meant})' if meant else ""


def _is_slip(word: str, key: str) -> bool:
    """Whether a word is one typing slip from a key: a letter added, missing or changed, or two neighbours swapped."""
    same = next((place for place, (one, other) in enumerate(zip(word, key, strict=False)) if one != other), None)
    same = min(len(word), len(key)) if same is None else same
    here, there = word[same:], key[same:]
    swapped = here[1:2] + here[:1] + here[2:]
    return there in (here[1:], swapped) or here == there[1:] or here[1:] == there[1:]


def _meant_turns(row: dict[str, Any]) -> str:
    """A hint at a misspelt key that seems to hold the turns, such as `, but "mesages" (did you mean "messages"?)`.

    Empty for none.
    """
    hints = {key: did_you_mean(key, (*TURNS, *ANSWERS, *ANSWER_KEYS)) for key in row if key not in KEYS}
    return next((f', but "{key}" ({meant})' for key, meant in hints.items() if meant), "")


def is_image(value: Any) -> bool:
    """Whether a value is an image beyond doubt: a text that names one, or bytes."""
    if isinstance(value, str):
        return value.lower().startswith(("data:", "http:", "https:")) or value.lower().endswith(IMAGE_NAMES)
    return isinstance(value, bytes) or (isinstance(value, dict) and isinstance(value.get("bytes"), bytes))


def _turn_mistake(turn: Any) -> str:
    if not isinstance(turn, dict):
        return f": expected an object, got {json_kind(turn)}"
    if not isinstance(turn_role(turn), str):
        return ': no string "role" (or "from")'
    if not any(name in turn for name in (*TURN_TEXTS, "tool_calls", "function_call")):
        return ': no "content" (or "text", "value")'
    content = first_value(turn, TURN_TEXTS)
    if not isinstance(content, (str, list, type(None))) and turn_role(turn) not in (*CALL_ROLES, *RESULT_ROLES):
        return f": expected a text or a list of parts, got {json_kind(content)}"
    for name in REASONING:
        if not (isinstance(turn.get(name), (str, bool)) or is_none(turn.get(name))):
            return f': "{name}" must be a string'
    return _calls_mistake(turn) or _parts_mistake(content_parts(turn))


def _calls_mistake(turn: dict[str, Any]) -> str:
    """The mistake in the keys of a turn that hold calls."""
    calls, call = turn.get("tool_calls"), turn.get("function_call")
    if calls is None and call is None:
        return ""
    if not (is_none(calls) or isinstance(calls, list)):
        return ': "tool_calls" must be a list'
    if isinstance(calls, list) and not all(is_none(each) or isinstance(each, dict) for each in calls):
        return ': "tool_calls" must be a list of objects'
    return "" if is_none(call) or isinstance(call, dict) else ': "function_call" must be an object'


def _is_text(parts: Any) -> bool:
    """Whether a value is a list of parts that are texts, as Anthropic's API takes the system's turn."""
    return isinstance(parts, list) and all(
        isinstance(part, dict) and part_kind(part) == "text" and not _part_mistake(part) for part in parts
    )


def _parts_mistake(parts: list[Any]) -> str:
    for place, part in enumerate(parts):
        if mistake := _part_mistake(part):
            return f".content[{place}]: {mistake}"
        if part_kind(part) == RESULT_PART and (mistake := _parts_mistake(content_parts(result_turn(part)))):
            return f".content[{place}]{mistake}"
    return ""


def _part_mistake(part: Any) -> str:
    if not isinstance(part, dict):
        return f"expected an object, got {json_kind(part)}"
    kind = part_kind(part)
    if not kind:
        return 'no string "type"'
    if kind in ("text", "input_text") and not isinstance(part.get("text"), str):
        return 'no string "text"'
    if kind == "thinking" and not isinstance(part.get("thinking"), str):
        return 'no string "thinking"'
    value = part_image(part)
    return "" if value is None or is_image_value(value) else 'its image must be a path, bytes, base64 or {"url": ...}'


def _as_list(value: Any) -> list[Any]:
    """The members of a list, or a single value as a list; without "" and missing values."""
    members = value if isinstance(value, list) else [value]
    return [member for member in members if not (member == "" or is_none(member))]


DIFFER, IN_ANSWER, NO_ANSWER = "placeholders and images differ", "image in an answer", "no answer"
NO_TURNS_AT_ALL, EMPTY_TEXT = "no turns", "empty text"
ANSWER_FIRST, UNKNOWN_PART = "starts with the assistant", "unknown content part"
WITHOUT_TOOLS = "tool calls without tools"
NOTHING_LEARNT, MIXED = "no answer is learnt", "only some of the earlier answers are learnt"
PYTHON_CALLS, CHANNELS = "python calls in a text", "channels of gpt-oss in a text"
CALLS_IN_TEXT = "calls in a text"
REFUSED_KEYS = (
    *((key, VIDEO) for key in ("video", "videos", "video_path")),
    *((key, AUDIO) for key in ("audio", "audios")),
)
CHANNEL = "<|channel|>"
PYTHON_CALL = re.compile(r"^[ \t]*\[[ \t]*([^\[\]()=\n]{1,200}?)[ \t]*\(", re.MULTILINE)
OTHER_CALLS = (  # with what models begin their calls; that of Hermes and Qwen is read
    "[TOOL_CALLS]",  # Mistral
    "<functioncall>",  # Glaive
    "<|python_tag|>",  # Llama
    "<function=",  # Qwen3-Coder
    "<|tool_call>",  # Gemma
    "<|tool_calls_section_begin|>",  # Kimi
    "tool▁calls▁begin",  # DeepSeek
    "<minimax:tool_call>",
)
NAMED = re.compile(r""""name"\s*:\s*"([^"]{1,200})\"""")
PLACEHOLDER = "<image>"
LINE_BREAKS = "\r\n"
REFUSED_PLACEHOLDERS = (("<video>", VIDEO), ("<audio>", AUDIO))


@frozen
class Placed:
    """The place of an image within a turn: its value, or the index of one of the row's images; neither: the
    next image.
    """

    value: Any = None
    index: int | None = None


def _without_documents(arguments: Any) -> Any:
    """The arguments of a chat template but for the documents, which are used."""
    if not isinstance(arguments, dict):
        return arguments
    return {key: value for key, value in arguments.items() if key != DOCUMENTS}


# Of a row or a request, which change the prompt: what of their values is left out, None for nothing.
SETTINGS: dict[str, Callable[[Any], Any]] = {
    OF_TEMPLATE: _without_documents,
    "reasoning_effort": lambda value: value,
    **dict.fromkeys(REASONING, lambda value: value if value in SWITCH or isinstance(value, dict) else None),
    "output_config": lambda value: value.get("effort") if isinstance(value, dict) else None,  # of Anthropic
    "chat_template": lambda value: value if isinstance(value, str) else None,
    "continue_final_message": lambda value: True if value is True else None,
    "add_generation_prompt": lambda value: False if value is False else None,
}
SETTING = '"{}" of their own, which is left out: a server has one setting for all'
CHOICE = (
    'a "tool_choice" of "none" or of one function and keep all their tools, as vLLM renders them; SGLang renders none, '
    "or that one: remove the others where it was the server"
)
STRAY = '"{}" as a column of no answer, which is left out: write it as a text in the turn of its answer'
UNLISTED = "a call of a function that is not among their tools, which is learnt like any other"
NOT_LEARNT = "turns behind the last answer that is learnt, which are left out"
LISTING = "a system turn that lists the tools, which is left out: the chat template lists them itself"


@frozen
class _Turn:
    """A turn of a row, and its content as texts and places of images."""

    said: Said
    items: list[str | Placed]

    @property
    def role(self) -> str:
        return self.said.role

    def placed(self) -> Turn:
        content = tuple(item if isinstance(item, str) else IMAGE for item in self.items)
        of = self.said
        return Turn(of.role, content, of.reasoning, of.tool_calls, of.call_id, of.name)


def sample_of_row(
    row: dict[str, Any],
    sample_id: str,
    finder: ImageFinder,
    *,
    require_answers: bool = True,
    default_tools: tuple[Tool, ...] = (),
    tool_syntax: ToolSyntax = "calls",
    call_ids: CallIds = "given",
    group: str = "category",
) -> RawSample | DroppedSample:
    """The sample in a well-formed row of turns, with the row's `split`.

    require_answers: if false, a conversation without an answer is kept if it ends with the user's turn. default_tools:
    for a row without any. tool_syntax, call_ids: as in the config. group: the key of the row's topic.
    """
    try:
        _refuse_other_media(row)
        tools, chosen = normal_tools(row), chosen_tool(row)
        hides_tools = chosen == "" and not tools
        if hides_tools:
            default_tools = ()
        given = tools or default_tools
        spoken, listing = _without_listing(said(_readable(row, given, tool_syntax), call_ids))
        noted = [CHOICE] if tools and chosen is not None else []
        noted += [STRAY.format(key) for key in _stray_thoughts(row)]
        if listing:
            tools, noted = tools or normal_tools({"tools": listing}), [*noted, LISTING]
        tools, documents = tools or default_tools, normal_documents(row)
        if documents is None:
            noted.append(OTHER_DOCUMENTS)
        turns = [_Turn(turn, _items(turn)) for turn in spoken]
        _check(turns, require_answers)
        called = [call.name for turn in spoken for call in turn.calls]
        if called and not tools and not hides_tools:
            raise Unusable(WITHOUT_TOOLS)
        if not set(called) <= {tool["function"].get("name") for tool in tools}:
            noted.append(UNLISTED)
        placed, values = _place_images(turns, row_images(row))
        end, learns_last = _learnt(spoken)
        if end < len(placed):
            placed = placed[:end]
            values = values[: sum(part is IMAGE for turn in placed for part in turn.content)]
            noted.append(NOT_LEARNT)
        return RawSample(
            sample_id,
            row.get("split"),
            placed,
            tuple(map(finder.image, values)),
            learns_last=learns_last,
            label=_label(row),
            topic=_topic(row, group),
            tools=tools,
            documents=documents or (),
            noted=tuple(noted),
            settings=_settings(row),
        )
    except Unusable as fault:
        return DroppedSample(sample_id, fault.reason, fault.detail)


def _settings(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    left_out = ((key, of(row.get(key))) for key, of in SETTINGS.items())
    return tuple((key, json.dumps(value, sort_keys=True, default=str)) for key, value in left_out if not is_none(value))


def _learnt(turns: list[Said]) -> tuple[int, bool]:
    """The end of the last answer that is learnt, and whether it is the only one; all turns without an answer that is
    not. Raises Unusable where none is learnt, and for marks that differ among the answers before it.
    """
    answers = [(place, turn.is_learnt) for place, turn in enumerate(turns, start=1) if turn.role == "assistant"]
    if all(is_learnt for _, is_learnt in answers):
        return len(turns), False
    end = max((place for place, is_learnt in answers if is_learnt), default=0)
    earlier = {is_learnt for place, is_learnt in answers if place < end}
    if not end:
        raise Unusable(NOTHING_LEARNT)
    if len(earlier) > 1:
        shown = ", ".join(f"{turns[place - 1].number}" for place, is_learnt in answers if is_learnt)
        raise Unusable(MIXED, f"those of turns {shown}")
    return end, earlier == {False}


def image_values(row: dict[str, Any]) -> Iterator[Any]:
    """All images of a row of turns."""
    yield from row_images(row)
    parts = [part for turn in turn_list(row) for part in content_parts(turn)]
    inner = [content_parts(result_turn(part)) for part in parts if part_kind(part) == RESULT_PART]
    for part in (*parts, *chain.from_iterable(inner)):
        if (value := part_image(part)) is not None:
            yield value


def _topic(row: dict[str, Any], key: str) -> str | None:
    """The string or integer under a key; what groups nothing, such as a list or a long text, is ignored."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    topic = str(value).strip()
    return topic if 0 < len(topic) <= LONGEST_TOPIC and is_valid_text(topic) else None


def _label(row: dict[str, Any]) -> str | None:
    """The text in a row's `label`, None without one; numbers, which tables have for classes, are ignored."""
    label = row.get("label")
    if not isinstance(label, str) or not label.strip():
        return None
    if not is_valid_text(label):
        raise Unusable(INVALID, 'key "label"')
    return label


def _refuse_other_media(row: dict[str, Any]) -> None:
    for key, reason in REFUSED_KEYS:
        if row.get(key) and not is_none(row[key]):
            raise Unusable(reason, f'key "{key}"')


def _readable(row: dict[str, Any], tools: Iterable[Tool], tool_syntax: ToolSyntax) -> list[dict[str, Any]]:
    """The turns of a row, its `system` among them. Raises Unusable for answers with calls in a form that is not read.

    Those are channels of gpt-oss, calls as in Python, `[name(key="value")]`, of a tool that is listed, and those of
    OTHER_CALLS. With the tool_syntax "text", all but channels stay texts, and results behind them are the user's turns.
    """
    turns = turn_list(row)
    if row.get("system") and (not turns or ROLE_NAMES.get(turn_role(turns[0])) != "system"):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    prose = "".join(own_text(each) for each in turns if ROLE_NAMES.get(turn_role(each)) == "system")
    names = {*(tool["function"].get("name") for tool in tools), *NAMED.findall(prose)}
    readable, is_text = [], False
    for number, turn in enumerate(turns, start=1):
        if is_text and turn_role(turn) in RESULT_ROLES:
            turn = user_turn(turn)
        if ROLE_NAMES.get(turn_role(turn)) == "assistant":
            text = own_text(turn)
            if CHANNEL in text:
                raise Unusable(CHANNELS, f"turn {number}")
            reason, shown = _calls_in(text.rpartition(END_OF_THOUGHT)[2], names)
            is_text = bool(reason)
            if is_text and tool_syntax != "text":
                raise Unusable(reason, f"turn {number}: {quoted(shown)}")
        readable.append(turn)
    return readable


def _calls_in(text: str, names: set[str]) -> tuple[str, str]:
    """Why the text of an answer has calls in a form that is not read, and what shows them; two empty strings for none.

    names: of the tools.
    """
    if not names:
        return "", ""
    if text.rstrip().endswith(")]") and any(call[1] in names for call in PYTHON_CALL.finditer(text)):
        return PYTHON_CALLS, text
    opening = next((each for each in OTHER_CALLS if each in text), "")
    if opening or _is_bare_call(text.strip(), names):
        return CALLS_IN_TEXT, opening or text
    return "", ""


def _is_bare_call(text: str, names: set[str]) -> bool:
    """Whether a text begins with a call as JSON, or a list of calls, as Llama writes them."""
    if not text.startswith(("{", "[")):
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    call = value[0] if isinstance(value, list) and value else value
    return isinstance(call, dict) and call.get("name") in names and any(key in call for key in ARGUMENTS)


def _without_listing(turns: list[Said]) -> tuple[list[Said], list[Tool]]:
    """The turns without a system turn that lists tools, and these tools."""
    for place, turn in enumerate(turns):
        if turn.role == "system" and (tools := tools_in("".join(str(part.get("text", "")) for part in turn.parts))):
            return [*turns[:place], *turns[place + 1 :]], tools
    return turns, []


def _items(turn: Said) -> list[str | Placed]:
    """The texts of a turn, with images."""
    return _stripped(_joined(item for part in turn.parts for item in _of_part(part, turn.role)), turn.role)


def _of_text(text: str, role: str) -> list[str | Placed]:
    """A text split at the images in it; an answer's text is unchanged."""
    if role == "assistant":
        return [text]
    for placeholder, reason in REFUSED_PLACEHOLDERS:
        if placeholder in text:
            raise Unusable(reason, placeholder)
    first, *others = text.split(PLACEHOLDER)
    return [first, *(item for other in others for item in (Placed(), other))]


def _of_part(part: dict[str, Any], role: str) -> list[str | Placed]:
    kind = part_kind(part)
    if kind in ("text", "input_text"):
        return _of_text(str(part["text"]), role)
    if kind in IMAGE_KINDS:
        index = part.get("index")
        return [Placed(part_image(part), index if isinstance(index, int) else None)]
    for name, reason in (("video", VIDEO), ("audio", AUDIO)):
        if name in kind:
            raise Unusable(reason, f'content part "{kind}"')
    if "tool" in kind:
        raise Unusable(NO_FUNCTION, quoted(kind))
    raise Unusable(UNKNOWN_PART, f'"{kind}"')


def _joined(items: Iterable[str | Placed]) -> list[str | Placed]:
    """The items with adjacent texts joined, and without empty texts."""
    joined: list[str | Placed] = []
    for is_text, run in groupby(items, key=lambda item: isinstance(item, str)):
        members = list(run)
        joined += ["".join(map(str, members))] if is_text else members
    return [item for item in joined if item != ""]


def _stripped(items: list[str | Placed], role: str) -> list[str | Placed]:
    """The items without white space at their borders, by the rules at the top of this file."""
    backwards = _without_breaks(items, str.lstrip)[::-1]
    stripped = _without_breaks(backwards, str.rstrip)[::-1]
    if role == "assistant" and stripped and isinstance(stripped[-1], str):
        stripped[-1] = stripped[-1].rstrip()
    return stripped


def _without_breaks(items: list[str | Placed], strip: Callable[[str, str], str]) -> list[str | Placed]:
    """The items without white space before the first text, and without line breaks after an image."""
    start = next((place for place, item in enumerate(items) if isinstance(item, str) and item.strip()), len(items))
    images = [item for item in items[:start] if isinstance(item, Placed)]
    text, rest = items[start : start + 1], items[start + 1 :]
    return [*images, *(strip(str(item), LINE_BREAKS) if images else item for item in text), *rest]


def _check(turns: list[_Turn], require_answers: bool) -> None:
    """Check that a conversation can be learned from. Raises Unusable."""
    spoken = [turn.role for turn in turns if turn.role != "system"]
    texts = [item for turn in turns for item in turn.items if isinstance(item, str)]
    texts += [turn.said.reasoning for turn in turns if turn.said.reasoning]
    answers = [turn.items for turn in turns if turn.role == "assistant"]
    wordless = (number for number, turn in enumerate(turns, start=1) if not (turn.items or turn.said.may_be_empty))
    empty = next(wordless, None)
    checks = (
        (not turns, NO_TURNS_AT_ALL, ""),
        (empty is not None, EMPTY_TEXT, f"turn {empty}"),
        (not all(is_valid_text(text) for text in texts), INVALID, ""),
        (spoken[:1] == ["assistant"], ANSWER_FIRST, ""),
        (not answers and (require_answers or spoken[-1:] != ["user"]), NO_ANSWER, ""),
        (any(isinstance(item, Placed) for items in answers for item in items), IN_ANSWER, ""),
    )
    for wrong, reason, detail in checks:
        if wrong:
            raise Unusable(reason, detail)


def _place_images(turns: list[_Turn], own: list[Any]) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns with places for images, and the images in the order of the places. own: the row's images."""
    places = [item for turn in turns for item in turn.items if isinstance(item, Placed)]
    placed = tuple(turn.placed() for turn in turns)
    if not places:
        return (with_leading_images(placed, len(own)) if own else placed), own
    values: list[Any] = []
    used: list[int] = []
    for place in places:
        if place.value is not None:
            values.append(place.value)
            continue
        used.append(len(used) if place.index is None else place.index)
        values.append(own[used[-1]] if 0 <= used[-1] < len(own) else None)
    if sorted(used) != list(range(len(own))):
        raise Unusable(DIFFER, f"{len(used)} placeholders, {len(own)} images")
    return placed, values
