"""Run `tokenize_chat`: chat messages into token shards, split by split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsl.errors import DataError
from dsl.stage import Stage
from ops.artifacts import ImageSamples
from ops.files import json_line, read_jsonl, write_json
from ops.tally import SPLITS, Tally
from ops.tokenize_chat.builtin import write_builtin_processor
from ops.tokenize_chat.encode import Unusable, encode
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.shards import TokenSample, write_token_shard
from ops.vision.images import decode
from ops.vision.packs import read_packed
from ops.vision.processor import Processor, load_processor

IMAGE_REFUSED = "image refused by the processor"
TOO_LONG = "longer than max_length"
TOO_FEW_LOSS_TOKENS = "fewer than min_loss_tokens"


def tokenize_chat(config: TokenizeChat, stage: Stage) -> None:
    """Write the token shards, tokens.json, samples.jsonl, the processor's files and summary.json.

    Drop reasons: "special token in the text", "refused by the chat template", "answer begins inside a token",
    "image refused by the processor", "longer than max_length" (never cut), "fewer than min_loss_tokens".
    Raises DataError for a processor that does not fit the samples, for more drops than max_dropped, and for a train
    split that is empty after filtering.
    """
    samples: ImageSamples = stage.inputs["samples"]
    rows = list(read_jsonl(samples.path / "samples.jsonl"))
    processor = prepare_processor(config, rows, stage.out_dir / "processor")
    tally = Tally(stage, "tokenize")
    records: list[dict[str, Any]] = []
    shards: list[dict[str, Any]] = []
    done = 0
    for split in SPLITS:
        shard = ShardBuffer(stage.out_dir, split, config.shard_samples, processor.patch_dim)
        for row in rows:
            if row["split"] != split:
                continue
            try:
                shard.add(tokenize_row(row, samples.path, processor, config), label(row))
                tally.keep(split)
            except Unusable as reason:
                tally.drop(str(reason), row["id"])
            done += 1
            if done % 50 == 0 or done == len(rows):
                stage.progress(done, len(rows))
        shard.flush()
        records += shard.records
        shards += shard.shards
    tally.finish(config.max_dropped)
    if not tally.splits["train"]:
        raise DataError(f"no sample is left in the train split:\n{tally.reasons() or '  none was there'}")
    with (stage.out_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json_line(record) for record in records)
    write_json(stage.out_dir / "tokens.json", tokens_info(processor, shards))
    stage.log(
        {
            "tokenize/tokens": sum(record["tokens"] for record in records),
            "tokenize/loss_tokens": sum(record["loss_tokens"] for record in records),
        },
        step=0,
    )


def prepare_processor(config: TokenizeChat, rows: list[dict[str, Any]], folder: Path) -> Processor:
    """The processor of the config, its files saved in `folder`; the built-in one is trained on the train split."""
    if config.processor == "builtin":
        conversations = [row["messages"] for row in rows if row["split"] == "train"]
        write_builtin_processor(folder, conversations, config.vocab_size)
        processor = load_processor(str(folder), config.min_pixels, config.max_pixels)
    else:
        processor = load_processor(config.processor, config.min_pixels, config.max_pixels)
    processor.save(folder)
    with_image = next((row["id"] for row in rows if row["image"] is not None), None)
    if with_image is not None and (processor.image_processor is None or processor.image_token_id is None):
        raise DataError(
            f'processor {config.processor}: sample "{with_image}" has an image, but there is no image processor '
            f'(preprocessor_config.json) or no token "{processor.image_token}"; take that of a vision-language model'
        )
    return processor


def tokenize_row(row: dict[str, Any], folder: Path, processor: Processor, config: TokenizeChat) -> TokenSample:
    """One sample, tokenised. Raises Unusable with the reason to drop it."""
    pixel_values, grid = pixels(row, folder, processor)
    image_tokens = int(grid.prod(dim=1).sum()) // processor.merge_size**2
    encoded = encode(processor, row["messages"], image_tokens, row["id"])
    if len(encoded.input_ids) > config.max_length:
        raise Unusable(TOO_LONG)
    if int(encoded.loss_mask.sum()) < config.min_loss_tokens:
        raise Unusable(TOO_FEW_LOSS_TOKENS)
    return TokenSample(
        id=row["id"],
        category=row["category"],
        input_ids=encoded.input_ids,
        loss_mask=encoded.loss_mask,
        pixel_values=pixel_values,
        image_grid_thw=grid,
        prompt_tokens=encoded.prompt_tokens,
    )


def pixels(row: dict[str, Any], folder: Path, processor: Processor) -> tuple[Tensor, Tensor]:
    """pixel_values float32 [R, patch_dim] and image_grid_thw int64 [I, 3]; no rows for a text-only sample."""
    if row["image"] is None:
        return torch.empty(0, processor.patch_dim), torch.empty(0, 3, dtype=torch.int64)
    image = decode(read_packed(folder, row["image"]))
    try:
        features = processor.pixels(image)
    except ValueError as error:
        raise Unusable(IMAGE_REFUSED) from error
    return features["pixel_values"].to(torch.float32), features["image_grid_thw"].to(torch.int64)


def label(row: dict[str, Any]) -> str:
    """The text of the last answer."""
    last = [message for message in row["messages"] if message["role"] == "assistant"][-1]
    return "".join(part["text"] for part in last["content"] if part["type"] == "text")


def tokens_info(processor: Processor, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of tokens.json."""
    return {
        "format": 1,
        "mask_token_id": processor.mask_token_id,
        "image_token_id": processor.image_token_id,
        "pad_token_id": processor.pad_token_id,
        "eos_token_ids": list(processor.eos_token_ids),
        "vocab_size": processor.vocab_size,
        "patch_dim": processor.patch_dim,
        "merge_size": processor.merge_size,
        "shards": shards,
    }


class ShardBuffer:
    """Collects the samples of one split and writes a shard whenever it holds enough of them."""

    def __init__(self, folder: Path, split: str, shard_samples: int, patch_dim: int) -> None:
        self.folder = folder
        self.split = split
        self.shard_samples = shard_samples
        self.patch_dim = patch_dim
        self.records: list[dict[str, Any]] = []
        self.shards: list[dict[str, Any]] = []
        self._samples: list[TokenSample] = []

    def add(self, sample: TokenSample, answer: str) -> None:
        self.records.append(
            {
                "id": sample.id,
                "split": self.split,
                "category": sample.category,
                "shard": self._file,
                "row": len(self._samples),
                "tokens": len(sample.input_ids),
                "prompt_tokens": sample.prompt_tokens,
                "loss_tokens": int(sample.loss_mask.sum()),
                "label": answer,
            }
        )
        self._samples.append(sample)
        if len(self._samples) == self.shard_samples:
            self.flush()

    def flush(self) -> None:
        """Write what is there as a shard."""
        if not self._samples:
            return
        write_token_shard(self.folder / self._file, self._samples, self.patch_dim)
        tokens = sum(len(sample.input_ids) for sample in self._samples)
        self.shards.append({"file": self._file, "split": self.split, "samples": len(self._samples), "tokens": tokens})
        self._samples = []

    @property
    def _file(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.safetensors"
