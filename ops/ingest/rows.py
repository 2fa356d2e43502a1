"""A row of any supported form as a sample, and the mistakes in its form.

    {"id": "a1", "split": "train", "image": "cats/7.png",
     "conversations": [{"role": "user", "text": "..."}, {"role": "assistant", "text": "..."}]}

The turns of a row have one of these forms:

    messages, or conversations          the turns themselves, whatever other columns there are
    prompt, and perhaps completion      each a text, or a list of turns; or response in the place of completion
    instruction, input and output       texts; an input follows the instruction on a line of its own; or response in
                                        the place of output, context in that of input (Dolly)
    question and answer                 texts

An answer that is null or empty is none: the row is a prompt. A turn has
`role` (or `from`: human, gpt) and `content` (or `text`, `value`). A content is a text, in which <image> means the next
of the row's images, or a list of parts: {"type": "text", "text"}, {"type": "image_url", "image_url": {"url"}},
{"type": "image", "image"}; an image part without its own image means the next of the row's images. `image` and
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
    unknown role                    other than system, user, assistant and their other names
    unknown content part            neither a text nor an image
    placeholders and images differ  in number, or a placeholder names a missing image
    image in an answer              which no target can generate
    tool calls are not supported    and videos, and audio
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from attrs import frozen

from dsl.errors import did_you_mean
from ops.ingest.image_values import AUDIO, IMAGE_NAMES, VIDEO, ImageFinder, is_image_value
from ops.ingest.sample import IMAGE, DroppedSample, ImagePart, RawSample, Turn, with_leading_images
from ops.lib.data.files import shown_json
from ops.lib.data.json_lines import json_kind
from ops.lib.data.sample_account import SPLITS, Unusable

TURNS = ("messages", "conversations")
# The keys of the answer to each question, of which a row gives one.
ANSWERS = {"prompt": ("completion", "response"), "instruction": ("output", "response"), "question": ("answer",)}
ANSWER_KEYS = tuple(dict.fromkeys(chain.from_iterable(ANSWERS.values())))
INPUTS = ("input", "context")  # of an instruction
KEYS = ("id", *TURNS, *ANSWERS, *ANSWER_KEYS, *INPUTS, "image", "images", "split", "system", "label", "category")
NO_TURNS = 'no list "messages" (or "conversations")'
OTHER_FORMS = ', "prompt", "instruction" with "output" (or "response"), or "question" with "answer"'
LONGEST_ID = 1000  # characters; the ids of all samples are in memory
LONGEST_TOPIC = 200  # characters
TURN_TEXTS = ("content", "text", "value")
REASONING = ("reasoning_content", "reasoning", "thinking")  # of an answer
PART_KINDS = ("text", "image", "image_url", "video", "video_url", "audio", "input_audio")


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
    if not isinstance(row.get("system") or "", str):
        return '"system" must be a string'
    if row.get("split") not in (None, *SPLITS):
        return f'"split" must be one of {", ".join(SPLITS)}, got {shown_json(row["split"])}'
    return _id_mistake(row.get("id"))


def _id_mistake(sample_id: Any) -> str:
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int, type(None))):
        return f'"id" must be a string or an integer, got {shown_json(sample_id)}'
    text = str(sample_id)
    if len(text) > LONGEST_ID:
        return f'"id" has {len(text)} characters, more than {LONGEST_ID}'
    return "" if is_valid_text(text) else '"id" contains half a surrogate pair'


def turn_list(row: dict[str, Any]) -> list[Any]:
    """All turns of a row without a mistake, in one list."""
    return [turn for _, turns in _keyed_turns(row) for turn in turns]


def row_images(row: dict[str, Any]) -> list[Any]:
    """The images in the columns `image` or `images` of a row."""
    return _as_list(row.get("images")) or _as_list(row.get("image"))


def part_kind(part: dict[str, Any]) -> str:
    """The type of a content part, inferred from its only key if not given; or an empty string."""
    kind = part.get("type")
    if isinstance(kind, str):
        return kind
    return next((key for key in PART_KINDS if not is_none(part.get(key))), "")


def part_image(part: dict[str, Any]) -> Any:
    """The image in a content part, or None."""
    if part.get("base64") is not None:
        return {"base64": part["base64"]}
    return next((part[name] for name in ("image", "image_url", "url", "path") if not is_none(part.get(name))), None)


def turn_role(turn: dict[str, Any]) -> Any:
    """The name of a turn's role."""
    return first_value(turn, ("role", "from"))


def is_none(value: Any) -> bool:
    """Whether a value is missing: null, or an object or list of only such, as tables write missing values."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, (dict, list)):
            values.extend(value.values() if isinstance(value, dict) else value)
        elif value is not None:
            return False
    return True


def first_value(mapping: dict[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of the names that is present and not null."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def is_valid_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


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
                yield name, _said("assistant", row[name])


def _inputs(question: str) -> tuple[str, ...]:
    return INPUTS if question == "instruction" else ()


def _said(role: str, value: Any) -> Any:
    """A text as a list of one turn; a list of turns is unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _turns_of(value)


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
        *(("image", "images") if _is_image(first) and not row_images(row) else ()),
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


def _is_image(value: Any) -> bool:
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
    if not isinstance(content, (str, list, type(None))):
        return f": expected a text or a list of parts, got {json_kind(content)}"
    if not isinstance(turn.get("reasoning_content"), (str, type(None))):
        return ': "reasoning_content" must be a string'
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if mistake := _part_mistake(part):
            return f".content[{place}]: {mistake}"
    return ""


def _part_mistake(part: Any) -> str:
    if not isinstance(part, dict):
        return f"expected an object, got {json_kind(part)}"
    kind = part_kind(part)
    if not kind:
        return 'no string "type"'
    if kind in ("text", "input_text") and not isinstance(part.get("text"), str):
        return 'no string "text"'
    value = part_image(part)
    return "" if value is None or is_image_value(value) else 'its image must be a path, bytes, base64 or {"url": ...}'


def _as_list(value: Any) -> list[Any]:
    """The members of a list, or a single value as a list; without "" and missing values."""
    members = value if isinstance(value, list) else [value]
    return [member for member in members if not (member == "" or is_none(member))]


TOOLS, DIFFER, IN_ANSWER = "tool calls are not supported", "placeholders and images differ", "image in an answer"
NO_ANSWER = "no answer"
ROLE_NAMES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt"), "assistant"),
}
TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
TOOL_KEYS = ("tool_calls", "function_call", "tool_call_id")
REFUSED_KEYS = (
    *((key, VIDEO) for key in ("video", "videos", "video_path")),
    *((key, AUDIO) for key in ("audio", "audios")),
    ("tools", TOOLS),
    ("functions", TOOLS),
)
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


def sample_of_row(
    row: dict[str, Any], sample_id: str, finder: ImageFinder, *, require_answers: bool = True
) -> RawSample | DroppedSample:
    """The sample in a well-formed row, with the row's `split`.

    require_answers: if false, a conversation without an answer is kept if it ends with the user's turn.
    """
    try:
        _refuse_other_media(row)
        turns = list(_turns(row))
        _check(turns, require_answers)
        placed, values = _place_images(turns, row_images(row))
        images = tuple(finder.image(value) for value in values)
        return RawSample(sample_id, row.get("split"), placed, images, label=_label(row), topic=_topic(row))
    except Unusable as fault:
        return DroppedSample(sample_id, fault.reason, fault.detail)


def image_values(row: dict[str, Any]) -> Iterator[Any]:
    """All images of a row of any form."""
    yield from row_images(row)
    for turn in turn_list(row):
        content = first_value(turn, TURN_TEXTS)
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (value := part_image(part)) is not None:
                yield value


def _topic(row: dict[str, Any]) -> str | None:
    """The string or integer of `category`; what groups nothing, such as a list or a long text, is ignored."""
    value = row.get("category")
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
        raise Unusable("invalid text", 'key "label"')
    return label


def _refuse_other_media(row: dict[str, Any]) -> None:
    for key, reason in REFUSED_KEYS:
        if row.get(key) and not is_none(row[key]):
            raise Unusable(reason, f'key "{key}"')


def _turns(row: dict[str, Any]) -> Iterator[tuple[str, list[str | Placed], str | None]]:
    """The role, texts with images, and reasoning of every turn."""
    turns = turn_list(row)
    if row.get("system") and (not turns or ROLE_NAMES.get(turn_role(turns[0])) != "system"):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    for turn in turns:
        name = turn_role(turn)
        if name in TOOL_ROLES or any(turn.get(key) and not is_none(turn[key]) for key in TOOL_KEYS):
            raise Unusable(TOOLS, f'role "{name}"')
        if name not in ROLE_NAMES:
            raise Unusable("unknown role", f'"{name}"')
        content = first_value(turn, TURN_TEXTS) or ""
        role = ROLE_NAMES[name]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        items = _joined(item for part in parts for item in _of_part(part, role))
        yield role, _stripped(items, role), _reasoning(turn)


def _reasoning(turn: dict[str, Any]) -> str | None:
    return next((turn[name] for name in REASONING if turn.get(name) and isinstance(turn[name], str)), None)


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
    if kind in ("image", "image_url", "input_image"):
        index = part.get("index")
        return [Placed(part_image(part), index if isinstance(index, int) else None)]
    for name, reason in (("video", VIDEO), ("audio", AUDIO), ("tool", TOOLS)):
        if name in kind:
            raise Unusable(reason, f'content part "{kind}"')
    raise Unusable("unknown content part", f'"{kind}"')


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


def _check(turns: list[tuple[str, list[str | Placed], str | None]], require_answers: bool) -> None:
    """Check that a conversation can be learned from. Raises Unusable."""
    spoken = [role for role, _, _ in turns if role != "system"]
    texts = [item for _, items, _ in turns for item in items if isinstance(item, str)]
    texts += [reasoning for _, _, reasoning in turns if reasoning]
    answers = [items for role, items, _ in turns if role == "assistant"]
    empty = next((place for place, (_, items, _) in enumerate(turns, start=1) if not items), None)
    checks = (
        (not turns, "no turns", ""),
        (empty is not None, "empty text", f"turn {empty}"),
        (not all(is_valid_text(text) for text in texts), "invalid text", ""),
        (spoken[:1] == ["assistant"], "starts with the assistant", ""),
        (not answers and (require_answers or spoken[-1:] != ["user"]), NO_ANSWER, ""),
        (any(isinstance(item, Placed) for items in answers for item in items), IN_ANSWER, ""),
    )
    for wrong, reason, detail in checks:
        if wrong:
            raise Unusable(reason, detail)


def _place_images(
    turns: list[tuple[str, list[str | Placed], str | None]], own: list[Any]
) -> tuple[tuple[Turn, ...], list[Any]]:
    """The turns with places for images, and the images in the order of the places. own: the row's images."""
    places = [item for _, items, _ in turns for item in items if isinstance(item, Placed)]
    placed = tuple(Turn(role, tuple(map(_part, items)), reasoning) for role, items, reasoning in turns)
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


def _part(item: str | Placed) -> str | ImagePart:
    return item if isinstance(item, str) else IMAGE
