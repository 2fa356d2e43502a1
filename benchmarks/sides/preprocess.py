"""The measurements of benchmarks/preprocess.py, in a separate process: one JSON line of figures.

    python -m benchmarks.sides.preprocess speed --kind text --rounds 5 --samples 200 --words 60
    python -m benchmarks.sides.preprocess memory --data data.jsonl

speed: `ours` is the work of tokenize_chat on one row, rendering to token sample with loss mask and prompt length;
`loop` is what one would write with transformers' processor: apply_chat_template to a text, then the processor's
call, which gives ids and pixels but no loss mask. Both get the same messages and encoded images, alternate, and are
measured in CPU seconds of this process, which has one thread. memory: the peak resident set of ingest, inject_images
and tokenize_chat, one after the other.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, BaseVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from benchmarks.harness import in_rounds
from benchmarks.preprocess_data import conversation, image
from benchmarks.sides.stage import FolderStage
from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.image_packs import PackWriter
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import ChatEncoder, tokenize_rows
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

MAX_PIXELS = 512 * 512
VOCABULARY = 8000


class NoVideo(BaseVideoProcessor):
    """A placeholder for the video processor that the processor class requires, and that needs torchvision."""

    def __init__(self) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--kind", choices=("text", "emoji", "chinese", "images"), default="text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = speed(arguments, Path(folder)) if arguments.what == "speed" else memory(arguments.data, Path(folder))
    print(json.dumps(figures))


def speed(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure CPU seconds by side and round, count the tokens, and compare both sides' ids and pixels."""
    rows = _rows(arguments, folder)
    processor_dir = folder / "processor"
    write_builtin_processor(processor_dir, [row["messages"] for row in rows], VOCABULARY)
    ours = _ours(rows, folder, processor_dir)
    loop = _loop(rows, folder, processor_dir)
    mine, theirs = ours(), loop()  # both warm
    rounds = in_rounds({"ours": partial(_seconds, ours), "loop": partial(_seconds, loop)}, arguments.rounds)
    same = all(
        sample.input_ids.tolist() == list(features["input_ids"][0])
        and bool(len(sample.pixel_values)) == ("pixel_values" in features)
        and torch.equal(sample.pixel_values, torch.as_tensor(features.get("pixel_values", sample.pixel_values)))
        for sample, features in zip(mine, theirs, strict=True)
    )
    return {"rounds": rounds, "tokens": sum(len(sample.input_ids) for sample in mine), "same": same}


def _seconds(side: Callable[[], object]) -> float:
    start = time.process_time()
    side()
    return time.process_time() - start


def _ours(rows: list[dict[str, Any]], folder: Path, processor_dir: Path) -> Callable[[], list[Any]]:
    config = TokenizeChat(samples=Ref("inject"), min_loss_tokens=1, max_length=1_000_000, workers=1)
    encoder = ChatEncoder(load_processor(str(processor_dir), max_pixels=MAX_PIXELS))
    return lambda: [sample for each in tokenize_rows(rows, folder, encoder, config) for sample in each.samples]


def _loop(rows: list[dict[str, Any]], folder: Path, processor_dir: Path) -> Callable[[], list[Any]]:
    tokenizer = AutoTokenizer.from_pretrained(processor_dir)
    load_processor(str(processor_dir), max_pixels=MAX_PIXELS).image_processor.save_pretrained(processor_dir)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(processor_dir),
        tokenizer=tokenizer,
        video_processor=NoVideo(),
        chat_template=tokenizer.chat_template,
    )

    def one(row: dict[str, Any]) -> Any:
        text = processor.apply_chat_template(row["messages"], tokenize=False)
        images = [Image.open(io.BytesIO(_packed(folder, reference))).convert("RGB") for reference in row["images"]]
        return processor(text=[text], **({"images": images, "return_tensors": "pt"} if images else {}))

    return lambda: [one(row) for row in rows]


def _packed(folder: Path, reference: Mapping[str, Any]) -> bytes:
    with (folder / reference["pack"]).open("rb") as file:
        file.seek(reference["offset"])
        return file.read(reference["size"])


def _rows(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of samples as inject_images writes them; images are JPEGs of 640 x 480."""
    packs = PackWriter(folder)
    rows = []
    for index in range(arguments.samples):
        question, answer = conversation(index, arguments.words, arguments.kind)
        images = [packs.add(image(index, "JPEG", (640, 480)))] if arguments.kind == "images" else []
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        rows.append({"id": f"sample-{index}", "messages": messages, "images": images})
    return rows


def memory(data: Path, folder: Path) -> dict[str, Any]:
    """Measure the peak resident set of the three ops in MiB, and count the resulting samples."""
    first = FolderStage(folder / "ingest", {})
    ingest(Ingest(source=str(data), seed=0), first)
    second = FolderStage(folder / "inject", {"samples": Samples(path=first.out_dir, digest="a")})
    inject_images(InjectImages(samples=Ref("ingest"), workers=2), second)
    third = FolderStage(folder / "tokenize", {"samples": ImageSamples(path=second.out_dir, digest="b")})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), min_loss_tokens=1, workers=2), third)
    kept = json.loads((third.out_dir / "summary.json").read_text())["kept"]
    return {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "kept": kept}


if __name__ == "__main__":
    main()
