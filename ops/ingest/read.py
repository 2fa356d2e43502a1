"""All samples of a source on disk as one stream, with all mistakes in its files reported together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
from attrs import define, frozen

from dsl.errors import DataError
from ops.ingest.image_folder import class_images, image_folder_sample
from ops.ingest.image_values import ImageFinder, path_named
from ops.ingest.records import Record
from ops.ingest.row_form import row_mistake
from ops.ingest.rows import image_values, sample_of_row
from ops.ingest.sample import DroppedSample, RawSample
from ops.ingest.source import SPLIT_NAMES, find_format, parts_of
from ops.lib.data.sample_account import Unusable

SHOWN_MISTAKES = 20
DRAWN_SPLITS = ("test", "val")
Read = tuple[float, RawSample | DroppedSample]


@frozen(kw_only=True)
class Reading:
    """How a source is read; the fields are those of ops/ingest/op.py."""

    source: Path
    format: str = "auto"
    image_root: str | None = None
    allow_outside: bool = False
    duplicate_ids: str = "refuse"
    question: str = ""
    answer: str = ""
    require_answers: bool = True

    def finder(self, folder: Path) -> ImageFinder:
        return ImageFinder(folder if self.image_root is None else folder / self.image_root, self.allow_outside)


def read_samples(reading: Reading) -> Iterator[Read]:
    """(Share of the source read so far, sample) in order, one at a time.

    Raises DataError for an unreadable source, and, after all of it is read, with up to 20 mistakes in its rows
    as `file:line: what is wrong`; nothing is yielded after the first mistake.
    """
    form = find_format(reading.source, reading.format)
    if form == "image-folder":
        return _image_folder(reading)
    return _rows(reading, form)


def named_images(reading: Reading) -> Iterator[tuple[str, Path | None]]:
    """Every image that a row names by a path: (name, file), None if it is missing or not allowed.

    A name is relative to the source's folder, or to image_root there, so that it stays the same when the
    whole folder is moved. Broken rows are skipped. Nothing for a folder whose images cannot be elsewhere: they are
    part of the source itself.
    """
    if reading.source.is_dir() and reading.image_root is None and not reading.allow_outside:
        return
    form = find_format(reading.source, reading.format)
    if form == "image-folder":
        names: Iterator[tuple[Path, str]] = (
            (reading.source, image.path.as_posix()) for image in class_images(reading.source, SPLIT_NAMES)
        )
    else:
        names = _names(reading, form)
    base = reading.source if reading.source.is_dir() else reading.source.parent
    for folder, name in names:
        try:
            file = reading.finder(folder).file(name)
        except Unusable:
            file = None
        yield (folder.relative_to(base) / name).as_posix(), file


def _names(reading: Reading, form: str) -> Iterator[tuple[Path, str]]:
    """(Folder of relative paths, name) of all images in rows."""
    for part in parts_of(reading.source, form, with_bytes=False):
        for record in part.records():
            if record.mistake or row_mistake(record.row):
                continue
            names = [path_named(value) for value in image_values(record.row)]
            yield from ((record.folder, name) for name in names if name is not None)


def _image_folder(reading: Reading) -> Iterator[Read]:
    images = list(class_images(reading.source, SPLIT_NAMES))
    finder = reading.finder(reading.source)
    named_splits = {image.split for image in images}
    for done, image in enumerate(images, start=1):
        sample = image_folder_sample(image, finder, reading.question, reading.answer)
        yield done / len(images), _with_split(sample, image.split, named_splits)


def _rows(reading: Reading, form: str) -> Iterator[Read]:
    parts = list(parts_of(reading.source, form))
    named_splits = {part.split for part in parts}
    ids = _Ids(reading.duplicate_ids)
    mistakes: list[str] = []
    for place, part in enumerate(parts):
        for record in part.records():
            mistake = record.mistake or row_mistake(record.row)
            if not mistake:
                own = record.row.get("id")
                default = f"{part.name}:{record.number}" if part.name else str(record.number)
                named = default if own is None else str(own)
                sample_id, mistake = ids.unique(named, record)
            if mistake:
                mistakes.append(f"{record.place}: {mistake}")
                if len(mistakes) == SHOWN_MISTAKES:
                    raise DataError("\n".join([*mistakes, f"... stopped after {SHOWN_MISTAKES} mistakes"]))
            elif not mistakes:
                sample = sample_of_row(
                    record.row, sample_id, reading.finder(record.folder), require_answers=reading.require_answers
                )
                if isinstance(sample, RawSample) and sample_id != named:
                    sample = attrs.evolve(sample, draw_id=named)
                yield (place + record.share) / len(parts), _with_split(sample, part.split, named_splits)
    if mistakes:
        raise DataError("\n".join(mistakes))


def _with_split(
    sample: RawSample | DroppedSample, part: str | None, named_splits: set[str | None]
) -> RawSample | DroppedSample:
    """The sample with its own split, else that of its part; splits without a part are drawn from train."""
    if isinstance(sample, DroppedSample) or sample.split is not None or part is None:
        return sample
    absent = tuple(name for name in DRAWN_SPLITS if name not in named_splits)
    if part == "train" and absent:
        return attrs.evolve(sample, draw=absent)
    return attrs.evolve(sample, split=part)


@define
class _Ids:
    """The ids in use, and their records."""

    duplicates: str
    places: dict[str, tuple[str, int]] = attrs.Factory(dict)  # origin and number, which need less memory than a text
    last: dict[str, int] = attrs.Factory(dict)  # the last number of an id that several samples have

    def unique(self, wanted: str, record: Record) -> tuple[str, str]:
        """(id, mistake): `wanted`, or with a number after it if it is in use and duplicates are numbered."""
        place = (record.origin, record.number)
        if wanted not in self.places:
            self.places[wanted] = place
            return wanted, ""
        if self.duplicates == "refuse":
            origin, number = self.places[wanted]
            return (
                "",
                f'id "{wanted}" is already that of {origin}{number}; ids must differ, or set duplicate_ids = "number"',
            )
        count = self.last.get(wanted, 1) + 1
        while f"{wanted}#{count}" in self.places:
            count += 1
        self.last[wanted] = count
        self.places[f"{wanted}#{count}"] = place
        return f"{wanted}#{count}", ""
