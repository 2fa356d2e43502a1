"""Prompts from a file of the user's: JSON lines (or one array) of

    {"id": "gsm8k-1", "category": "math", "messages": [{"role": "user", "content": "..."}], "images": ["cats/7.png"]}

A row is read as `ingest` reads it: contents are texts or lists of parts, images stand where a part or <image> says, or
else at the start of the first user turn; paths start at the file's folder and stay in it. Unlike there, nothing is
passed over: a benchmark of which some prompts are missing would give a figure that nobody can compare, so every line
that cannot be used is a mistake, and all of them are told at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.evaluate.metric_names import ALL
from ops.ingest.image_values import ImageFinder
from ops.ingest.records import Record, json_records
from ops.ingest.row_form import row_mistake
from ops.ingest.rows import sample_of_row
from ops.ingest.sample import DroppedSample
from ops.inject_images.op import InjectImages
from ops.inject_images.run import messages as joined_messages
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.samples import load_image, prompt_sample
from ops.tokenize_chat.shards import TokenSample
from ops.tokenize_chat.template import Messages, Unusable
from ops.vision.images import fault_of, strict_pillow

CATEGORY = re.compile(r"[A-Za-z0-9][\w .-]*", re.ASCII)  # what a metric's name may hold
SHOWN_MISTAKES = 100
MAX_PIXELS = InjectImages.__op__.fields["max_image_pixels"].default
MIN_SIDE = InjectImages.__op__.fields["min_image_side"].default


@frozen(eq=False)
class BenchmarkPrompt:
    """One line. images: files, or the encoded images themselves."""

    id: str
    category: str
    messages: Messages
    images: tuple[Path | bytes, ...]
    length: int
    encoder: ChatEncoder

    def sample(self) -> TokenSample:
        return _sample(self.id, self.category, self.messages, self.images, self.encoder)


def read_benchmark(file: Path, encoder: ChatEncoder) -> list[BenchmarkPrompt]:
    """All prompts of the file. Raises DataError with every line that cannot be used, as `file:line: what to mend`."""
    if not file.is_file():
        raise DataError(f"{file}: no such file; benchmark must name a file of JSON lines")
    prompts: list[BenchmarkPrompt] = []
    mistakes: list[str] = []
    places: dict[str, str] = {}
    with strict_pillow():
        for record in json_records(file):
            mistake = record.mistake or _form_mistake(record.row) or _taken(record, places)
            if not mistake:
                places[str(record.row["id"])] = record.place
                try:
                    prompts.append(_prompt(record, encoder))
                except Unusable as fault:
                    mistake = f"{fault.reason}: {fault.detail}" if fault.detail else fault.reason
            if mistake:
                mistakes.append(f"{record.place}: {mistake}")
    if mistakes:
        more = [f"... and {len(mistakes) - SHOWN_MISTAKES} more"] if len(mistakes) > SHOWN_MISTAKES else []
        raise DataError(
            "\n".join(
                [
                    *mistakes[:SHOWN_MISTAKES],
                    *more,
                    f"{len(mistakes)} of {len(mistakes) + len(prompts)} lines of the benchmark cannot be used: mend "
                    "them or take them out; docs/evaluation.md has the format",
                ]
            )
        )
    if not prompts:
        raise DataError(f"{file}: holds no prompts; give it one JSON object a line (docs/evaluation.md)")
    return prompts


def _form_mistake(row: Any) -> str:
    """What is wrong with a row, or an empty string; what every data file must keep to, and what a benchmark adds."""
    return row_mistake(row) or next(_lacking(row), "")


def _lacking(row: dict[str, Any]) -> Iterator[str]:
    if row.get("id") is None or not str(row["id"]).strip():
        yield 'no "id": give each prompt its own, by which results of two drafts can be compared'
    category = row.get("category")
    if not isinstance(category, str) or not CATEGORY.fullmatch(category):
        yield (
            f'"category" must be a word, of letters, digits, blanks and "_.-", by which results are grouped, got '
            f"{category!r}"
        )
    if category == ALL:
        yield f'"category" must not be "{ALL}", which stands for all of them together'


def _taken(record: Record, places: dict[str, str]) -> str:
    place = places.get(str(record.row["id"]))
    return f'id "{record.row["id"]}" is that of {place} as well; ids must differ' if place else ""


def _prompt(record: Record, encoder: ChatEncoder) -> BenchmarkPrompt:
    """The prompt of a row of the right form. Raises Unusable."""
    finder = ImageFinder(record.folder, remedy="copy it into the folder of the benchmark file")
    row = sample_of_row(record.row, str(record.row["id"]), finder, require_answers=False)
    if isinstance(row, DroppedSample):
        raise Unusable(row.reason, row.detail)
    if row.turns[-1].role != "user":
        raise Unusable("the last message is not the user's", "leave out the answer, which the target is to give")
    turns = joined_messages({"conversations": [turn.row() for turn in row.turns], "images": row.images}, "in-place")
    if row.images and (encoder.processor.image_processor is None or encoder.processor.image_token_id is None):
        raise Unusable("it has an image, and the target is a text model", "take it out")
    for image in row.images:
        reason, detail = fault_of(_encoded(image), MAX_PIXELS, MIN_SIDE)
        if reason:
            raise Unusable(reason, f"{image}: {detail}" if isinstance(image, Path) else detail)
    category = record.row["category"]
    length = len(_sample(row.id, category, turns, row.images, encoder).input_ids)
    return BenchmarkPrompt(row.id, category, turns, row.images, length, encoder)


def _sample(
    sample_id: str, category: str, turns: Messages, images: tuple[Path | bytes, ...], encoder: ChatEncoder
) -> TokenSample:
    """Raises Unusable."""
    chunks = [load_image(_encoded(image), encoder.processor) for image in images]
    return prompt_sample(sample_id, category, turns, chunks, encoder)


def _encoded(image: Path | bytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()
