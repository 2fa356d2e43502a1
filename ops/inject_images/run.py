"""Run `inject_images`: decode each image, check it, and place it by the policy, one sample at a time.

This is where broken and too large images are found: `tokenize_chat` decodes an image a second time for its pixels, and
no later node decodes it again. Packs are linked, so that the bytes of an image are stored once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field

from dsl.stage import Stage
from ops.artifacts import Samples
from ops.inject_images.messages import messages
from ops.inject_images.op import InjectImages
from ops.lib.data.files import json_line, read_jsonl
from ops.lib.data.image_packs import link_packs, read_packed
from ops.lib.data.ordered_threads import available_cores, in_order
from ops.lib.data.sample_account import Tally
from ops.lib.vision.images import TOO_LARGE, TOO_SMALL, UNDECODABLE, fault_of, strict_pillow

Fault = tuple[str, str]  # reason, detail; two empty strings for none
NO_FAULT = ("", "")
SEVERAL, NO_USER_TURN = "more than one image", "image but no user turn"
IN_RESULT = "image in a tool result"
DIFFER, ONLY_IMAGE = "placeholders and images differ", "a turn of nothing but an image"
IN_PLACE = 'image_policy = "in-place" keeps them'
KEPT = ("id", "split", "category", "images", "label", "topic", "tools", "documents", "learnt")
REMEDIES = {
    TOO_LARGE: "raise max_image_pixels",
    TOO_SMALL: "lower min_image_side",
    UNDECODABLE: "replace the broken image files",
    SEVERAL: IN_PLACE,
    IN_RESULT: IN_PLACE,
    ONLY_IMAGE: IN_PLACE,
    DIFFER: "write an <image> for each image of a sample",
}


def inject_images(config: InjectImages, stage: Stage) -> None:
    """Write samples.jsonl with chat messages, link the image packs, and write summary.json and dropped.csv.

    Images are checked by threads, since Pillow decodes outside Python's lock, a bounded number of samples ahead; the
    rows keep their order. Those samples and the digests of the images are in memory.
    Drop reasons: "image undecodable", "image too large", "image too small", "placeholders and images differ" and, with
    image_policy = "first-user-turn", "more than one image", "image but no user turn", "image in a tool result" (which
    is not there before the call) and "a turn of nothing but an image" (a turn other than the first user turn, left
    empty).
    Raises DataError for more drops than max_dropped, and if no sample is left.
    """
    samples: Samples = stage.inputs["samples"]
    tally = Tally(stage, "inject", REMEDIES)
    total = _count_lines(samples.path / "samples.jsonl")
    rows = read_jsonl(samples.path / "samples.jsonl")
    stage.progress(0, total)
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
        for done, (row, (reason, detail)) in enumerate(checked(rows, config, samples.path), start=1):
            if reason:
                tally.drop(reason, row["id"], detail)
            else:
                kept = {name: row[name] for name in KEPT if name in row}
                file.write(json_line({**kept, "messages": messages(row, config.image_policy)}))
                tally.keep(row["split"])
            if done % 100 == 0 or done == total:
                stage.progress(done, total)
    link_packs(samples.path, stage.out_dir)
    tally.finish(config.max_dropped)


def checked(rows: Iterator[dict[str, Any]], config: InjectImages, folder: Path) -> Iterator[tuple[dict, Fault]]:
    """The rows in order, each with the fault for which it must be dropped."""
    check = _Check(config, folder)
    with strict_pillow():
        yield from in_order(lambda row: (row, check.fault(row)), rows, config.workers or available_cores())


@define
class _Check:
    """Finds the faults of rows. An image of many samples is decoded once, or at most once by each thread."""

    config: InjectImages
    folder: Path
    known: dict[bytes, Fault] = field(factory=dict)  # digest -> fault of an image

    def fault(self, row: dict[str, Any]) -> Fault:
        """The fault of a row, as reason and detail; two empty strings if the row is valid."""
        places = sum(part["type"] == "image" for turn in row["conversations"] for part in turn["content"])
        if places != len(row["images"]):
            return DIFFER, f"{places} placeholders, {len(row['images'])} images"
        if row["images"] and self.config.image_policy == "first-user-turn" and (fault := _policy_fault(row))[0]:
            return fault
        faults = (self._image_fault(image) for image in row["images"])
        return next((fault for fault in faults if fault[0]), NO_FAULT)

    def _image_fault(self, image: dict[str, Any]) -> Fault:
        digest = bytes.fromhex(image["sha256"])
        if digest not in self.known:
            encoded = read_packed(self.folder, image)
            self.known[digest] = fault_of(encoded, self.config.max_image_pixels, self.config.min_image_side)
        return self.known[digest]


def _count_lines(file: Path) -> int:
    with file.open("rb") as opened:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: opened.read(1 << 20), b""))


def _policy_fault(row: dict[str, Any]) -> Fault:
    """The fault of a sample that cannot have a single image, placed at the start of its first user turn."""
    turns = row["conversations"]
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    if len(row["images"]) > 1:
        return SEVERAL, f'{len(row["images"])} images; image_policy = "in-place" keeps them'
    if first is None:
        return NO_USER_TURN, ""
    results = (turn["role"] == "tool" and len(_texts(turn)) < len(turn["content"]) for turn in turns)
    seen = next((place for place, is_seen in enumerate(results, start=1) if is_seen), None)
    if seen is not None:
        return IN_RESULT, f'turn {seen}; image_policy = "in-place" keeps it'
    only_images = (turn is not first and bool(turn["content"]) and not _texts(turn) for turn in turns)
    empty = next((place for place, is_empty in enumerate(only_images, start=1) if is_empty), None)
    return NO_FAULT if empty is None else (ONLY_IMAGE, f'turn {empty}; image_policy = "in-place" keeps it')


def _texts(turn: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in turn["content"] if part["type"] != "image"]
