"""Run `inject_images`: check each image and put it into the first user turn."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from dsl.stage import Stage
from ops.artifacts import Samples
from ops.files import json_line, read_jsonl
from ops.inject_images.op import InjectImages
from ops.tally import Tally
from ops.vision.images import reason_to_drop
from ops.vision.packs import read_packed

TWO_IMAGES, NO_USER_TURN = "more than one image", "image but no user turn"


def inject_images(config: InjectImages, stage: Stage) -> None:
    """Write samples.jsonl with chat messages, link the image packs, and write summary.json.

    Drop reasons: "image undecodable", "image too large", "image too small", "more than one image",
    "image but no user turn".
    Raises DataError for more drops than max_dropped, and where no sample is left.
    """
    samples: Samples = stage.inputs["samples"]
    tally = Tally(stage, "inject")
    rows = list(read_jsonl(samples.path / "samples.jsonl"))
    checked: dict[str, str] = {}  # sha256 -> reason: an image of many samples is decoded once
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
        for done, row in enumerate(rows, start=1):
            reason = _reason_to_drop(row, samples.path, config, checked)
            if reason:
                tally.drop(reason, row["id"])
            else:
                file.write(json_line({**_identity(row), "messages": messages(row), "images": row["images"]}))
                tally.keep(row["split"])
            if done % 100 == 0 or done == len(rows):
                stage.progress(done, len(rows))
    for pack in sorted(samples.path.glob("images-*.bin")):
        _link(pack, stage.out_dir / pack.name)
    tally.finish(config.max_dropped)


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Chat messages of an ingested sample; the image part stands before the text of the first user turn."""
    turns = [
        {**turn, "content": [part for part in turn["content"] if part["type"] != "image"]}
        for turn in row["conversations"]
    ]
    if row["images"]:
        first = next(turn for turn in turns if turn["role"] == "user")
        first["content"].insert(0, {"type": "image"})
    return turns


def _identity(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("id", "split", "category")}


def _reason_to_drop(row: dict[str, Any], folder: Path, config: InjectImages, checked: dict[str, str]) -> str:
    if not row["images"]:
        return ""
    if len(row["images"]) > 1:
        return TWO_IMAGES
    if all(turn["role"] != "user" for turn in row["conversations"]):
        return NO_USER_TURN
    image = row["images"][0]
    if image["sha256"] not in checked:
        encoded = read_packed(folder, image)
        checked[image["sha256"]] = reason_to_drop(encoded, config.max_image_pixels, config.min_image_side)
    return checked[image["sha256"]]


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system makes none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
