"""A row of any supported form as a sample.

    {"id": "a1", "split": "train", "image": "cats/7.png",
     "conversations": [{"role": "user", "text": "..."}, {"role": "assistant", "text": "..."}]}

`conversations` or `messages`, or another form of ops/ingest/row_form.py, such as `prompt` and `completion`. A turn has
`role` (or `from`: human, gpt) and `content` (or `text`, `value`). A content is a text, in which <image> means the next
of the row's images, or a list of parts: {"type": "text", "text"}, {"type": "image_url", "image_url": {"url"}},
{"type": "image", "image"}; an image part without its own image means the next of the row's images. `image` and
`images` are one image or a list (ops/ingest/image_values.py); without placeholders they are placed at the start of the
first user turn. `id`, `split`, `system` and `label`, the correct answer, are optional.

Texts are unchanged, with three exceptions, which are removed: the line breaks between a turn's text and the images at
its ends ("<image>\nWhat?", "What?\n<image>"), since chat templates join images and texts; texts of only white
space at a turn's ends; and the white space after an answer, before which the target would end.

ops/ingest/row_form.py checks the form of a row. A well-formed sample that cannot be used is dropped, for a
reason of ops/ingest/image_values.py or one of these:

    no turns, empty text, no answer, starts with the assistant
    invalid text                    half a surrogate pair, which is not valid UTF-8
    unknown role                    other than system, user, assistant and their other names
    unknown content part            neither a text nor an image
    placeholders and images differ  in number, or a placeholder names a missing image
    image in an answer              which no target can generate
    tool calls are not supported    and videos, and audio
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from attrs import frozen

from ops.ingest.image_values import AUDIO, VIDEO, ImageFinder
from ops.ingest.row_form import (
    REASONING,
    TURN_TEXTS,
    first_value,
    is_none,
    is_valid_text,
    part_image,
    part_kind,
    row_images,
    turn_list,
    turn_role,
)
from ops.ingest.sample import IMAGE, DroppedSample, ImagePart, RawSample, Turn, with_leading_images
from ops.lib.data.sample_account import Unusable

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
    """An image within a turn: its value, or the index of one of the row's images, or neither: the next of them."""

    value: Any = None
    index: int | None = None


def sample_of_row(
    row: dict[str, Any], sample_id: str, finder: ImageFinder, *, require_answers: bool = True
) -> RawSample | DroppedSample:
    """The sample of a well-formed row, with the row's `split`.

    require_answers: if false, a conversation without an answer is kept if it ends with the user's turn.
    """
    try:
        _refuse_other_media(row)
        turns = list(_turns(row))
        _check(turns, require_answers)
        placed, values = _place_images(turns, row_images(row))
        images = tuple(finder.image(value) for value in values)
        return RawSample(sample_id, row.get("split"), placed, images, label=_label(row))
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


def _label(row: dict[str, Any]) -> str | None:
    """The string of `label`; numbers, which tables have for classes, are ignored."""
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
    """(role, texts and images, reasoning) of every turn."""
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
    """A text and the images in it; an answer's text is unchanged."""
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
    """Adjacent texts as one, without empty texts."""
    joined: list[str | Placed] = []
    for is_text, run in groupby(items, key=lambda item: isinstance(item, str)):
        members = list(run)
        joined += ["".join(map(str, members))] if is_text else members
    return [item for item in joined if item != ""]


def _stripped(items: list[str | Placed], role: str) -> list[str | Placed]:
    """The rules for white space at the top of this file."""
    backwards = _without_breaks(items, str.lstrip)[::-1]
    stripped = _without_breaks(backwards, str.rstrip)[::-1]
    if role == "assistant" and stripped and isinstance(stripped[-1], str):
        stripped[-1] = stripped[-1].rstrip()
    return stripped


def _without_breaks(items: list[str | Placed], strip: Callable[[str, str], str]) -> list[str | Placed]:
    """The items without white space before the first text, and that without the line breaks after an image."""
    start = next((place for place, item in enumerate(items) if isinstance(item, str) and item.strip()), len(items))
    images = [item for item in items[:start] if isinstance(item, Placed)]
    text, rest = items[start : start + 1], items[start + 1 :]
    return [*images, *(strip(str(item), LINE_BREAKS) if images else item for item in text), *rest]


def _check(turns: list[tuple[str, list[str | Placed], str | None]], require_answers: bool) -> None:
    """Raise Unusable if the conversation cannot be learned from."""
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
    """The turns with their places for images, and the images in the order of the places; own: those of the row."""
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
