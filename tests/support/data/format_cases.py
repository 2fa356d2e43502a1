"""Ten samples, written in every format that `ingest` reads."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from attrs import frozen
from PIL import Image
from pyarrow import parquet

IMAGE = None  # stands for the next image of the sample
SPLITS = ("train", "val", "test")


@frozen
class Case:
    """A sample in no format yet. turns: (role, texts and IMAGE); images: names of files."""

    split: str
    turns: tuple[tuple[str, tuple[str | None, ...]], ...]
    images: tuple[str, ...] = ()


def cases() -> list[Case]:
    """The samples: six with one image, two with two images in two places, two of text, one of them with two turns."""
    one = [
        Case(
            SPLITS[place % 3],
            (("user", (IMAGE, f"Which picture is number {place}?")), ("assistant", (f"It is the picture {place}.",))),
            (f"{place}.png",),
        )
        for place in range(6)
    ]
    pairs = [
        Case(
            "train",
            (
                ("system", ("Be brief.",)),
                ("user", ("First ", IMAGE, " and then ", IMAGE, ": do they differ?")),
                ("assistant", ("They do differ, in their colours.",)),
            ),
            (f"{place}.png", f"{place + 1}.jpg"),
        )
        for place in (0, 6)
    ]
    text = Case("train", (("user", ("Say something plain.",)), ("assistant", ("Something plain was asked for.",))))
    talk = Case(
        "val",
        (
            ("user", ("Say one.",)),
            ("assistant", ("One, as you have asked.",)),
            ("user", ("Say two.",)),
            ("assistant", ("Two, as you have asked.",)),
        ),
    )
    return [*one, *pairs, text, talk]


def write_images(folder: Path) -> None:
    """Write the images that the cases name, below folder/images."""
    (folder / "images").mkdir(parents=True)
    for place in range(8):
        for suffix, kind in (("png", "PNG"), ("jpg", "JPEG")):
            image = Image.new("RGB", (40 + 8 * place, 36), (30 * place, 200 - 20 * place, 90))
            image.save(folder / "images" / f"{place}.{suffix}", format=kind)


def encoded(folder: Path, name: str) -> bytes:
    return (folder / "images" / name).read_bytes()


def own(case: Case, folder: Path, text_key: str = "text") -> dict[str, Any]:
    """A case in dflow's own format: <image> where an image is, omitted where it would be placed anyway."""
    turns = [{"role": role, text_key: _with_markers(parts)} for role, parts in case.turns]
    if len(case.images) == 1:
        turns[0][text_key] = turns[0][text_key].removeprefix("<image>\n")
    names = [f"images/{name}" for name in case.images]
    return {"conversations": turns, "image": names[0] if len(names) == 1 else names or None}


def llava(case: Case, folder: Path) -> dict[str, Any]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[role], "value": _with_markers(parts)} for role, parts in case.turns]
    images = [f"images/{name}" for name in case.images]
    return {"conversations": turns, **({"image": images[0] if len(images) == 1 else images} if images else {})}


def openai(part_of: Callable[[Path, str], dict[str, Any]]) -> Callable[[Case, Path], dict[str, Any]]:
    """A writer of messages with content parts. part_of: makes the part for an image from (folder, name)."""

    def row(case: Case, folder: Path) -> dict[str, Any]:
        names = iter(case.images)
        messages = []
        for role, parts in case.turns:
            content = [
                part_of(folder, next(names)) if part is IMAGE else {"type": "text", "text": part} for part in parts
            ]
            messages.append({"role": role, "content": content if role == "user" else parts[0]})
        return {"messages": messages}

    return row


def data_url(folder: Path, name: str) -> dict[str, Any]:
    kind = "png" if name.endswith("png") else "jpeg"
    text = base64.b64encode(encoded(folder, name)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{text}", "detail": "auto"}}


def path_url(folder: Path, name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"images/{name}"}}


def qwen_path(folder: Path, name: str) -> dict[str, Any]:
    return {"type": "image", "image": f"file://{folder}/images/{name}"}


def qwen_base64(folder: Path, name: str) -> dict[str, Any]:
    return {"type": "image", "image": base64.b64encode(encoded(folder, name)).decode()}


def table_rows(folder: Path, image_of: Callable[[Path, str], Any]) -> list[dict[str, Any]]:
    """Rows of a table as Hugging Face stores them: messages of parts, and the images in a column of their own."""
    rows = []
    for number, case in enumerate(cases()):
        messages = [
            {
                "role": role,
                "content": [
                    {"type": "text", "text": part} if part else {"type": "image", "text": None} for part in parts
                ],
            }
            for role, parts in case.turns
        ]
        images = [image_of(folder, name) for name in case.images]
        rows.append({"id": f"s{number}", "split": case.split, "messages": messages, "images": images})
    return rows


def as_struct(folder: Path, name: str) -> dict[str, Any]:
    return {"bytes": encoded(folder, name), "path": name}


def as_path(folder: Path, name: str) -> str:
    return f"images/{name}"


def write_json(folder: Path, spelling: Callable[[Case, Path], dict[str, Any]], *, array: bool = False) -> Path:
    rows = [{"id": f"s{number}", "split": case.split, **spelling(case, folder)} for number, case in enumerate(cases())]
    file = folder / ("data.json" if array else "data.jsonl")
    if array:
        file.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_csv(folder: Path, rows: list[dict[str, Any]], name: str = "data.csv") -> Path:
    """Write rows as CSV with the standard library, with every key as a column."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (folder / name).open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, columns, delimiter="\t" if name.endswith("tsv") else ",")
        writer.writeheader()
        writer.writerows(rows)
    return folder / name


def write_parquet(folder: Path, image_of: Callable[[Path, str], Any]) -> Path:
    parquet.write_table(
        pyarrow.Table.from_pylist(table_rows(folder, image_of)), folder / "data.parquet", row_group_size=3
    )
    return folder / "data.parquet"


def write_arrow(folder: Path, image_of: Callable[[Path, str], Any]) -> Path:
    rows = table_rows(folder, image_of)
    if image_of is not as_path:
        features = datasets.Features(
            {
                "id": datasets.Value("string"),
                "split": datasets.Value("string"),
                "messages": [
                    {
                        "role": datasets.Value("string"),
                        "content": [{"type": datasets.Value("string"), "text": datasets.Value("string")}],
                    }
                ],
                "images": [datasets.Image()],
            }
        )
    else:
        features = None
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _with_markers(parts: tuple[str | None, ...]) -> str:
    """A turn's text with <image> for each image; at the start of a turn with a newline after it, as in LLaVA."""
    text = "".join("<image>" if part is IMAGE else part for part in parts)
    return text.replace("<image>", "<image>\n", 1) if parts[0] is IMAGE else text


def png(size: tuple[int, int] = (8, 6), colour: tuple[int, int, int] = (250, 20, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, format="PNG")
    return file.getvalue()
