"""Samples from a JSONL file: one JSON object a line.

    {"id": "a1", "conversations": [{"role": "user", "text": "..."}, {"role": "assistant", "text": "..."}],
     "image": "cats/7.png", "split": "train"}

`id` (default: the line number), `image` (a path relative to the file, a list of paths, or null) and `split` may be
missing. LLaVA's spelling is read as well: "from" / "value", "human" / "gpt", and its "<image>" markers are removed.

A line that is not such an object is a mistake: the first 20 are reported together. A sample that is well-formed but
cannot be used is dropped and counted, for one of these reasons:

    no turns                    the conversation is empty
    unknown role                other than system, user (human), assistant (gpt)
    empty text                  a turn without text
    invalid text                a turn with half a surrogate pair, which no UTF-8 can hold
    starts with the assistant   the first turn after the system's is an answer
    no answer                   there is no assistant turn
    image missing               no such file, or not a regular one
    image outside the folder    a path that leads out of the file's folder, by "..", a link or an absolute path
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsl.errors import DataError, did_you_mean
from ops.ingest.sample import ROLES, DroppedSample, RawSample, Turn, with_leading_images
from ops.tally import SPLITS

KEYS = ("id", "conversations", "image", "split")
SHOWN_MISTAKES = 20
ROLE_NAMES = {**{role: role for role in ROLES}, "human": "user", "gpt": "assistant"}
IMAGE_MARKERS = re.compile(r"^(\s*<image>)+|(<image>\s*)+$")
MISSING, OUTSIDE = "image missing", "image outside the folder"


def read_jsonl(file: Path) -> list[RawSample | DroppedSample]:
    """All samples of a file, in order. Raises DataError with up to 20 mistakes as `file:line: what is wrong`."""
    samples: list[RawSample | DroppedSample] = []
    mistakes: list[str] = []
    seen: dict[str, int] = {}
    for number, line in _lines(file):
        row, mistake = _parse(line)
        mistake = mistake or _structure_mistake(row)
        if not mistake:
            sample_id = str(row.get("id", number))
            if sample_id in seen:
                mistake = f'id "{sample_id}" is that of line {seen[sample_id]} as well; ids must differ'
            seen.setdefault(sample_id, number)
        if mistake:
            mistakes.append(f"{file}:{number}: {mistake}")
            if len(mistakes) == SHOWN_MISTAKES:
                mistakes.append(f"... stopped after {SHOWN_MISTAKES} mistakes")
                break
            continue
        samples.append(_sample(sample_id, row, file.parent))
    if mistakes:
        raise DataError("\n".join(mistakes))
    return samples


def named_images(file: Path) -> Iterator[Path]:
    """The image files that the lines name, where they exist inside the file's folder; broken lines are passed over."""
    for _, line in _lines(file):
        row, mistake = _parse(line)
        if mistake or not isinstance(row, dict):
            continue
        image = row.get("image")
        for name in image if isinstance(image, list) else [image]:
            if isinstance(name, str):
                path = image_path(name, file.parent)
                if isinstance(path, Path):
                    yield path


def image_path(name: str, folder: Path) -> Path | str:
    """Where an image lies, links resolved; or the reason why it cannot be used."""
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            return OUTSIDE
        return path if path.is_file() else MISSING
    except (OSError, ValueError, RuntimeError):  # too long a name, a NUL in it, a loop of links
        return MISSING


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of every line that is not blank. Raises DataError where the file cannot be read."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                stripped = line.removeprefix(b"\xef\xbb\xbf").strip()
                if stripped:
                    yield number, stripped
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); `source` must name a JSONL file") from error


def _parse(line: bytes) -> tuple[Any, str]:
    try:
        return json.loads(line.decode("utf-8")), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return None, f"broken JSON at column {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, too many brackets
        return None, f"broken JSON: {error}"


def _structure_mistake(row: Any) -> str:
    """What is wrong with the form of a line, or an empty string."""
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}"
    turns = row.get("conversations")
    if not isinstance(turns, list):
        return 'no list "conversations"'
    for place, turn in enumerate(turns):
        if not isinstance(turn, dict):
            return f"conversations[{place}]: expected an object, got {type(turn).__name__}"
        for names in (("role", "from"), ("text", "value")):
            if not isinstance(_either(turn, names), str):
                return f'conversations[{place}]: no string "{names[0]}" (or "{names[1]}")'
    image = row.get("image")
    for key in row:
        if key not in KEYS and (meant := did_you_mean(key, [known for known in KEYS if known not in row])):
            return f'unknown key "{key}" ({meant})'
    if not (image is None or all(isinstance(name, str) for name in (image if isinstance(image, list) else [image]))):
        return '"image" must be a path, a list of paths or null'
    if row.get("split") not in (None, *SPLITS):
        return f'"split" must be one of {", ".join(SPLITS)}, got {row["split"]!r}'
    sample_id = row.get("id", 0)
    if isinstance(sample_id, bool) or not isinstance(sample_id, (str, int)):
        return f'"id" must be a string or an integer, got {sample_id!r}'
    return "" if _is_valid_text(str(sample_id)) else '"id" holds half a surrogate pair'


def _sample(sample_id: str, row: dict[str, Any], folder: Path) -> RawSample | DroppedSample:
    names = row.get("image") or []
    names = names if isinstance(names, list) else [names]
    turns = []
    for turn in row["conversations"]:
        role, text = _either(turn, ("role", "from")), _either(turn, ("text", "value"))
        if names and ROLE_NAMES.get(role) == "user":
            text = IMAGE_MARKERS.sub("", text)
        turns.append((ROLE_NAMES.get(role, ""), text.strip()))
    reason = _reason_to_drop(turns)
    if reason:
        return DroppedSample(sample_id, reason)
    images = []
    for name in names:
        path = image_path(name, folder)
        if not isinstance(path, Path):
            return DroppedSample(sample_id, path)
        images.append(path)
    placed = tuple(Turn(role, (text,)) for role, text in turns)
    placed = with_leading_images(placed, len(images)) if images else placed
    return RawSample(sample_id, row.get("split"), placed, tuple(images))


def _reason_to_drop(turns: list[tuple[str, str]]) -> str:
    roles = [role for role, _ in turns]
    spoken = [role for role in roles if role != "system"]
    checks = (
        (not turns, "no turns"),
        ("" in roles, "unknown role"),
        (not all(text for _, text in turns), "empty text"),
        (not all(_is_valid_text(text) for _, text in turns), "invalid text"),
        (spoken[:1] == ["assistant"], "starts with the assistant"),
        ("assistant" not in roles, "no answer"),
    )
    return next((reason for wrong, reason in checks if wrong), "")


def _either(turn: dict[str, Any], names: tuple[str, str]) -> Any:
    return turn.get(names[0], turn.get(names[1]))


def _is_valid_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
