"""Injected samples as inject_images would write them, tokenised; and transformers' own processor to compare with."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_stage import FakeStage
from PIL import Image
from transformers import AutoTokenizer, BaseVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from dsl.op import Ref
from ops.artifacts import ImageSamples
from ops.lib.data.files import json_line
from ops.lib.data.image_packs import PackWriter
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

LONG_ANSWER = "word " * 40 + "end."


class NoVideo(BaseVideoProcessor):
    """A placeholder for the video processor that the real processor class requires, and that needs torchvision."""

    def __init__(self):
        pass


def real_processor(folder: Path) -> Qwen3VLProcessor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=tokenizer,
        video_processor=NoVideo(),
        chat_template=tokenizer.chat_template,
    )


def png(width: int, height: int) -> bytes:
    image = Image.new("RGB", (width, height))
    image.putdata([(x * 7 % 256, y * 11 % 256, x * y % 256) for y in range(height) for x in range(width)])
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def conversation(*turns: tuple[str, str], image: bytes | None = None, split: str = "train") -> dict:
    return {"turns": turns, "image": image, "split": split}


def write_samples(folder: Path, conversations: list[dict]) -> ImageSamples:
    """Write conversations as the artifact that inject_images would write."""
    folder.mkdir(parents=True)
    packs = PackWriter(folder)
    rows = []
    for place, sample in enumerate(conversations):
        messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in sample["turns"]]
        if sample["image"]:
            next(turn for turn in messages if turn["role"] == "user")["content"].insert(0, {"type": "image"})
        rows.append(
            {
                "id": f"s{place}",
                "split": sample["split"],
                "category": "image" if sample["image"] else "text",
                "messages": messages,
                "images": [packs.add(sample["image"])] if sample["image"] else [],
            }
        )
    (folder / "samples.jsonl").write_text("".join(json_line(row) for row in rows), encoding="utf-8")
    return ImageSamples(path=folder, digest="d")


SERVED = {"contexts": "served", "min_loss_tokens": 1, "vocab_size": 400, "workers": 1}


def row(name: str, messages: list[dict[str, Any]], image: bytes | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "messages": messages, "image": image, "split": "train", **more}


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> ImageSamples:
    """The artifact of inject_images with these rows; an image stands at the start of the first message."""
    samples = write_samples(folder, [])
    packs = PackWriter(folder)
    lines = []
    for each in rows:
        messages = list(each["messages"])
        if each["image"]:
            messages[0] = {**messages[0], "content": [{"type": "image"}, *messages[0]["content"]]}
        images = [packs.add(each["image"])] if each["image"] else []
        given = {key: value for key, value in each.items() if key not in ("name", "image", "messages")}
        category = "image" if images else "text"
        lines.append({"id": each["name"], "category": category, "messages": messages, "images": images, **given})
    (folder / "samples.jsonl").write_text("".join(map(json_line, lines)), encoding="utf-8")
    return samples


def run_tokenize(folder: Path, samples: ImageSamples, **config) -> FakeStage:
    stage = FakeStage(folder, {"samples": samples})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), **config), stage)
    return stage


def summary_of(stage: FakeStage) -> dict:
    return json.loads((stage.out_dir / "summary.json").read_text())


def write_short_and_long(file: Path) -> Path:
    """A sample for test, one for val, and a short one and two long ones for train."""
    lengths = {"short": 1, "test": 1, "val": 1, "long": 6, "longer": 8}
    lines = [
        {
            "id": name,
            "split": name if name in ("test", "val") else "train",
            "messages": [
                {"role": "user", "content": "Count them."},
                {"role": "assistant", "content": "There are three of them. " * length},
            ],
        }
        for name, length in lengths.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
