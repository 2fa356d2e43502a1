"""Prompts from a user's file: JSON lines (or one array) of

    {"id": "gsm8k-1", "category": "math", "messages": [{"role": "user", "content": "..."}], "images": ["cats/7.png"]}

A row is read as `ingest` reads it: contents are texts or lists of parts, images stand where a part or <image> says, or
else at the start of the first user turn; paths start at the file's folder and stay in it. Unlike there, nothing is
skipped: results of a benchmark with missing prompts cannot be compared, so every line
that cannot be used is a mistake, and all are reported at once.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from dsl.op import op_of
from ops.evaluate.benchmark_rows import BenchmarkRow, Misfit, benchmark_rows, refuse
from ops.inject_images.messages import messages as joined_messages
from ops.inject_images.op import InjectImages
from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.images import fault_of, strict_pillow
from ops.tokenize_chat.encode import ChatEncoder
from ops.tokenize_chat.samples import load_image, prompt_sample
from ops.tokenize_chat.template import Messages, Unusable

MAX_PIXELS = op_of(InjectImages).fields["max_image_pixels"].default
MIN_SIDE = op_of(InjectImages).fields["min_image_side"].default


@frozen(eq=False)
class BenchmarkPrompt:
    """One line. origin: `file:line`. images: files, or the encoded images themselves."""

    origin: str
    id: str
    category: str
    messages: Messages
    images: tuple[Path | bytes, ...]
    length: int
    encoder: ChatEncoder

    def sample(self) -> TokenSample:
        return _sample(self.id, self.category, self.messages, self.images, self.encoder)


def read_benchmark(file: Path, encoder: ChatEncoder) -> list[BenchmarkPrompt]:
    """All prompts of the file. Raises DataError with every line that cannot be used, as `file:line: what to fix`."""
    prompts: list[BenchmarkPrompt] = []
    misfits: list[Misfit] = []
    with strict_pillow():
        for row in benchmark_rows(file):
            if isinstance(row, Misfit):
                misfits.append(row)
                continue
            try:
                prompts.append(_prompt(row, encoder))
            except Unusable as fault:
                misfits.append(Misfit(row.place, f"{fault.reason}: {fault.detail}" if fault.detail else fault.reason))
    refuse(file, misfits, len(misfits) + len(prompts))
    return prompts


def _prompt(row: BenchmarkRow, encoder: ChatEncoder) -> BenchmarkPrompt:
    """Raises Unusable."""
    asked = row.sample
    turns = joined_messages({"conversations": [turn.row() for turn in asked.turns], "images": asked.images}, "in-place")
    if asked.images and (encoder.processor.image_processor is None or encoder.processor.image_token_id is None):
        raise Unusable("it has an image, and the target is a text model", "remove it")
    for image in asked.images:
        reason, detail = fault_of(_encoded(image), MAX_PIXELS, MIN_SIDE)
        if reason:
            raise Unusable(reason, f"{image}: {detail}" if isinstance(image, Path) else detail)
    length = len(_sample(asked.id, row.category, turns, asked.images, encoder).input_ids)
    return BenchmarkPrompt(row.place, asked.id, row.category, turns, asked.images, length, encoder)


def _sample(
    sample_id: str, category: str, turns: Messages, images: tuple[Path | bytes, ...], encoder: ChatEncoder
) -> TokenSample:
    """Raises Unusable."""
    chunks = [load_image(_encoded(image), encoder.processor) for image in images]
    return prompt_sample(sample_id, category, turns, chunks, encoder)


def _encoded(image: Path | bytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()
