"""Samples from a folder of images: `<class>/<image>`, or all directly in it, without classes.

Above either there may be the folders `train`, `val` and `test`. All of it may lie deeper, below folders that alone hold
images, such as `101_ObjectCategories` of CalTech101, whose images without an object are dropped. An image beside such
folders has no class, or no split, and is dropped. Folders without images are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from dsl.errors import DataError
from ops.ingest.image_values import IMAGE_NAMES, ImageFinder
from ops.ingest.op import LABEL
from ops.ingest.row_values import INVALID, is_valid_text
from ops.ingest.sample import IMAGE, DroppedSample, RawSample, Turn
from ops.lib.data.sample_account import Unusable

NO_CLASS = "all"  # label of images without classes; the folder's name would change their answers when it is moved
BESIDE, NO_IMAGE = "image beside folders", "not an image"
BACKGROUND, NO_OBJECT = "BACKGROUND_Google", "background, no class"  # of CalTech101


@frozen
class ClassImage:
    """A file of an image folder. path: relative to the folder. label: its class, None beside class folders.

    split: by its folder, or None.
    """

    path: Path
    label: str | None
    split: str | None


def class_images(folder: Path, split_names: dict[str, str]) -> Iterator[ClassImage]:
    """The images of class folders, or of a folder without folders, by path, and images that lie beside class folders.

    Hidden files are ignored.
    """
    base = _base(folder, split_names)
    top = _class_folders(folder / base)
    if top and _are_splits(top, split_names):
        yield from _beside(folder, base)
        for name in top:
            yield from _of_classes(folder, base / name, split_names[name.lower()])
        return
    yield from _of_classes(folder, base, None)


def image_folder_sample(
    image: ClassImage, finder: ImageFinder, question: str, answer: str
) -> RawSample | DroppedSample:
    """A sample with one question about the image, answered with its label. {label} in both templates is its folder's
    name.
    """
    name = image.path.as_posix()
    if not is_valid_text(name):
        return DroppedSample(ascii(name), INVALID, "the name of the file")
    if image.path.suffix.lower() not in IMAGE_NAMES:
        return DroppedSample(name, NO_IMAGE, f"file names end in {', '.join(IMAGE_NAMES)}")
    if image.label is None:
        return DroppedSample(name, BESIDE, "move it into one of them, or all images into one folder without subfolders")
    if image.label == BACKGROUND:
        return DroppedSample(name, NO_OBJECT, "CalTech101's images of anything; rename their folder to use them")
    turns = (
        Turn("user", (IMAGE, question.replace(LABEL, image.label))),
        Turn("assistant", (answer.replace(LABEL, image.label),)),
    )
    try:
        return RawSample(name, None, turns, (finder.file(name),), label=image.label)
    except Unusable as fault:
        return DroppedSample(name, fault.reason, fault.detail)


def _base(folder: Path, split_names: dict[str, str]) -> Path:
    """The relative path of the folder that holds classes or splits: below folders that alone hold images, else "."."""
    below = Path()
    while names := [name for name in _folders(folder / below) if _holds_image(folder / below / name)]:
        if len(names) > 1 or _are_splits(names, split_names):
            return below
        if any(_beside(folder, below)):
            break
        below /= names[0]
    return Path()


def _are_splits(names: list[str], split_names: dict[str, str]) -> bool:
    return all(name.lower() in split_names for name in names)


def _of_classes(folder: Path, below: Path, split: str | None) -> Iterator[ClassImage]:
    labels = _class_folders(folder / below)
    if labels:
        yield from _beside(folder, below)
    for label in labels:
        yield from _files(folder, below / label, label, split)
    if not labels:
        yield from _files(folder, below, NO_CLASS, split)


def _beside(folder: Path, below: Path) -> Iterator[ClassImage]:
    """The images that lie directly in a folder of folders; other files there, such as a list of classes,
    are not data.
    """
    names = sorted(entry.name for entry in os.scandir(folder / below) if not entry.is_dir())
    for name in names:
        if not name.startswith(".") and Path(name).suffix.lower() in IMAGE_NAMES:
            yield ClassImage(below / name, None, None)


def _files(folder: Path, below: Path, label: str, split: str | None) -> Iterator[ClassImage]:
    for here, folders, names in os.walk(folder / below):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield ClassImage((Path(here) / name).relative_to(folder), label, split)


def _class_folders(folder: Path) -> list[str]:
    """The folders in a folder; none if none of them has an image."""
    names = _folders(folder)
    return names if any(_holds_image(folder / name) for name in names) else []


def _holds_image(folder: Path) -> bool:
    for _, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(Path(name).suffix.lower() in IMAGE_NAMES for name in names if not name.startswith(".")):
            return True
    return False


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}); `source` must name a folder") from error
