"""All samples of one or more sources on disk as one stream, with all mistakes in their files reported together.

The names of several sources are their places in the list and their file names: `2/photos`. They begin the ids of
samples without one, and say a split where a name such as `train.jsonl` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import attrs
from attrs import define, frozen

from dsl.errors import DataError
from ops.ingest.image_folder import ClassImage, class_images, image_folder_sample
from ops.ingest.image_values import IMAGE_NAMES, ImageFinder, path_named
from ops.ingest.op import CallIds, Columns, ToolSyntax
from ops.ingest.records import Record
from ops.ingest.rows import image_values, row_mistake, sample_of_row, turn_list
from ops.ingest.sample import DroppedSample, RawSample, opening_of
from ops.ingest.source import (
    SPLIT_NAMES,
    Part,
    answers_of,
    find_format,
    metadata_files,
    mistakes_of_parts,
    parts_of,
    split_named,
)
from ops.ingest.tools import Tool, default_tools
from ops.ingest.traffic import OUTPUT, Answers
from ops.lib.data.sample_account import Unusable

SHOWN_MISTAKES = 20
DRAWN_SPLITS = ("test", "val")
Read = tuple[float, RawSample | DroppedSample]


@frozen(kw_only=True)
class Reading:
    """The settings for reading sources, with the fields of ops/ingest/op.py."""

    sources: tuple[Path, ...]
    format: str = "auto"
    image_root: str | tuple[str, ...] | None = None
    allow_outside: bool = False
    duplicate_ids: str = "refuse"
    question: str = ""
    answer: str = ""
    require_answers: bool = True
    default_tools: str | None = None
    tool_syntax: ToolSyntax = "calls"
    call_ids: CallIds = "given"
    group: str = "category"
    columns: Columns | None = None

    def names(self) -> list[str]:
        """A unique name for each source; empty for a single one, where it does not matter."""
        if len(self.sources) == 1:
            return [""]
        return [f"{place}/{source.name}" for place, source in enumerate(self.sources, start=1)]

    def roots(self) -> list[str | None]:
        """The image_root of each source; None stands for the folder of its files."""
        given = self.image_root if isinstance(self.image_root, tuple) else (self.image_root,) * len(self.sources)
        return [None if root in ("", ".") else root for root in given]

    def form(self, source: Path) -> str:
        """The format of a source. Raises DataError."""
        return find_format(source, self.format, self.columns)

    def parts(self, source: Path, form: str, *, with_bytes: bool = True, allow_outside: bool = False) -> list[Part]:
        """The parts of a source of rows. Raises DataError as `parts_of`."""
        return list(
            parts_of(
                source,
                form,
                with_bytes=with_bytes,
                allow_outside=allow_outside or self.allow_outside,
                question=self.question,
                columns=self.columns,
            )
        )

    def tools(self) -> tuple[Tool, ...]:
        """The tools of rows without any. Raises DataError."""
        return () if self.default_tools is None else default_tools(Path(self.default_tools))

    def finder(self, folder: Path, root: str | None) -> ImageFinder:
        return ImageFinder(folder if root is None else folder / root, self.allow_outside, root)


@frozen
class _Source:
    """A source: images by class, or parts with rows. name: from Reading.names. root: from Reading.roots.

    split: the one that its name says.
    """

    path: Path
    name: str
    root: str | None
    images: tuple[ClassImage, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def split(self) -> str | None:
        return split_named(self.name)

    @property
    def splits(self) -> set[str | None]:
        own = {*(image.split for image in self.images), *(part.split for part in self.parts)}
        return {split or self.split for split in own}


def read_samples(reading: Reading) -> Iterator[Read]:
    """Pairs of the share of the sources read so far and a sample, in order, one at a time.

    Raises DataError for an unreadable source. After all sources are read, it raises DataError with up to 20 mistakes in
    rows, as `file:line: what is wrong`; no sample is yielded after the first mistake.
    """
    forms = [reading.form(source) for source in reading.sources]
    return _all(reading, forms)


def given_splits(reading: Reading) -> set[str]:
    """The splits that rows and the names of files, folders and sources give, whatever the config says.

    Rows are read until val and test are both found, without the images in Parquet files. Raises DataError for an
    unreadable source.
    """
    forms = [reading.form(source) for source in reading.sources]
    sources = _opened(reading, forms, with_bytes=False)
    found = {split for source in sources for split in source.splits if split is not None}
    records = (record for source in sources for part in source.parts for record in part.records())
    for record in records:
        if found.issuperset(DRAWN_SPLITS):
            break
        if not record.mistake and isinstance(record.row, dict) and record.row.get("split"):
            found.add(str(record.row["split"]))
    return found


def named_images(reading: Reading) -> Iterator[tuple[str, Path | None]]:
    """Every image that a row names by a path, as name and file; None if it is missing or not allowed.

    A name is relative to the source's folder or image_root, so that it stays the same if the whole folder moves. With
    several sources it begins with the source's name. Broken rows are skipped. Nothing is yielded for a folder whose
    images cannot be elsewhere: they are part of the source itself.
    """
    for source, name, root in zip(reading.sources, reading.names(), reading.roots(), strict=True):
        if not (source.is_dir() and root is None and not reading.allow_outside):
            found = _named_images(reading, source, root)
            yield from ((f"{name}/{image}" if name else image, file) for image, file in found)


def _named_images(reading: Reading, source: Path, root: str | None) -> Iterator[tuple[str, Path | None]]:
    form = reading.form(source)
    if form == "image-folder":
        root = None
        names: Iterator[tuple[Path, str]] = (
            (source, image.path.as_posix()) for image in class_images(source, SPLIT_NAMES)
        )
    else:
        names = _names(reading.parts(source, form, with_bytes=False))
    base = source if source.is_dir() else source.parent
    for folder, name in names:
        try:
            file = reading.finder(folder, root).file(name)
        except Unusable:
            file = None
        yield (folder.relative_to(base) / name).as_posix(), file


def _names(parts: list[Part]) -> Iterator[tuple[Path, str]]:
    """The folder of relative paths and the name, for all images that rows name."""
    for part in parts:
        for record in part.records():
            if record.mistake or row_mistake(record.row):
                continue
            names = [path_named(value) for value in image_values(record.row)]
            yield from ((record.folder, name) for name in names if name is not None)


def _all(reading: Reading, forms: list[str]) -> Iterator[Read]:
    sources = _opened(reading, forms)
    named_splits = set[str | None]().union(*(source.splits for source in sources))
    ids = _Ids(reading.duplicate_ids)
    parts = [part for source in sources for part in source.parts]
    mistakes = mistakes_of_parts(parts, require_answers=reading.require_answers)
    answers = answers_of(parts, mistakes)
    if len(mistakes) >= SHOWN_MISTAKES:
        raise DataError("\n".join([*mistakes[:SHOWN_MISTAKES], f"... stopped after {SHOWN_MISTAKES} mistakes"]))
    for place, source in enumerate(sources):
        read = _image_folder(reading, source) if source.images else _rows(reading, source, ids, answers, mistakes)
        for share, split, sample in read:
            if not mistakes:
                yield (place + share) / len(sources), _with_split(sample, split or source.split, named_splits)
    if mistakes:
        raise DataError("\n".join(mistakes))


def _opened(reading: Reading, forms: list[str], *, with_bytes: bool = True) -> list[_Source]:
    return [
        _Source(path, name, None, images=tuple(class_images(path, SPLIT_NAMES)))
        if form == "image-folder"
        else _Source(path, name, root, parts=tuple(reading.parts(path, form, with_bytes=with_bytes)))
        for path, name, root, form in zip(reading.sources, reading.names(), reading.roots(), forms, strict=True)
    ]


def unread_captions(reading: Reading) -> list[Path]:
    """The caption files in folders of which only the images are read."""
    folders = [source for source in reading.sources if reading.form(source) == "image-folder"]
    return [file for folder in folders for file in metadata_files(folder)]


@frozen
class WithoutRow:
    """The number of images in folders with captions, and of those that no row names. example: one that no row names."""

    source: Path
    images: int
    unnamed: int
    example: str

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.unnamed:,} of {self.images:,} images are not used, since no row of the captions "
            f"names them, such as {self.example}"
        )


def images_without_row(reading: Reading) -> list[WithoutRow]:
    """The sources with captions that leave images out; none are known with an image_root."""
    found = []
    for source, root in zip(reading.sources, reading.roots(), strict=True):
        form = reading.form(source)
        read = root is None and source.is_dir() and form in ("csv", "json", "parquet")
        folders = {file.parent for file in metadata_files(source)} if read else ()
        below = (file for folder in folders for file in folder.rglob("*") if not file.name.startswith("."))
        images = {os.path.abspath(file) for file in below if file.suffix.lower() in IMAGE_NAMES}  # noqa: PTH100
        if images:
            names = _names(reading.parts(source, form, with_bytes=False, allow_outside=True))
            unnamed = images.difference(os.path.abspath(folder / name) for folder, name in names)  # noqa: PTH100
            if unnamed:
                example = os.path.relpath(min(unnamed), source)
                found.append(WithoutRow(source, len(images), len(unnamed), example))
    return found


def _image_folder(reading: Reading, source: _Source) -> Iterator[tuple[float, str | None, RawSample | DroppedSample]]:
    finder, tools = reading.finder(source.path, None), reading.tools()
    for done, image in enumerate(source.images, start=1):
        sample = image_folder_sample(image, finder, reading.question, reading.answer)
        if isinstance(sample, RawSample):
            sample = attrs.evolve(sample, tools=tools)
        if source.name:
            sample = attrs.evolve(sample, id=f"{source.name}/{sample.id}")
        yield done / len(source.images), image.split, sample


def _rows(
    reading: Reading, source: _Source, ids: _Ids, answers: Answers, mistakes: list[str]
) -> Iterator[tuple[float, str | None, RawSample | DroppedSample]]:
    """Triples for all rows: the share of the source read, the part's split, and the sample.

    Mistakes are added to `mistakes`; no row comes after the first one.
    """
    tools = reading.tools()
    for place, part in enumerate(source.parts):
        if part.batch == OUTPUT:
            continue
        name = "/".join(filter(None, (source.name, part.name)))
        for record in part.records(answers):
            mistake = record.mistake or row_mistake(record.row)
            if not mistake:
                own = record.row.get("id")
                default = f"{name}:{record.number}" if name else str(record.number)
                named = default if own is None else str(own)
                sample_id, mistake = ids.unique(named, record)
            if mistake:
                mistakes.append(f"{record.place}: {mistake}")
                if len(mistakes) == SHOWN_MISTAKES:
                    raise DataError("\n".join([*mistakes, f"... stopped after {SHOWN_MISTAKES} mistakes"]))
            elif not mistakes and record.lacks and (reading.require_answers or not turn_list(record.row)):
                yield (place + record.share) / len(source.parts), part.split, DroppedSample(sample_id, record.lacks)
            elif not mistakes:
                sample = sample_of_row(
                    record.row,
                    sample_id,
                    reading.finder(record.folder, source.root),
                    require_answers=reading.require_answers,
                    default_tools=tools,
                    tool_syntax=reading.tool_syntax,
                    call_ids=reading.call_ids,
                    group=reading.group,
                )
                if isinstance(sample, RawSample) and sample_id != named:
                    sample = attrs.evolve(sample, draw_id=named)
                if isinstance(sample, RawSample) and record.is_request:
                    sample = attrs.evolve(sample, opening=opening_of(sample), lacks=record.lacks)
                yield (place + record.share) / len(source.parts), part.split, sample


def _with_split(
    sample: RawSample | DroppedSample, part: str | None, named_splits: set[str | None]
) -> RawSample | DroppedSample:
    """The sample with its own split, else with that of its part. Splits without a part are drawn from train."""
    if isinstance(sample, DroppedSample) or sample.split is not None or part is None:
        return sample
    absent = tuple(name for name in DRAWN_SPLITS if name not in named_splits)
    if part == "train" and absent:
        return attrs.evolve(sample, draw=absent)
    return attrs.evolve(sample, split=part)


@define
class _Ids:
    """The ids used so far, and their records."""

    duplicates: str
    places: dict[str, tuple[str, int]] = attrs.Factory(dict)  # origin and number, which need less memory than a text
    last: dict[str, int] = attrs.Factory(dict)  # the last number of an id that several samples have

    def unique(self, wanted: str, record: Record) -> tuple[str, str]:
        """A unique id and a mistake: `wanted`, or with a number after it if it is in use and duplicates are
        numbered.
        """
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
