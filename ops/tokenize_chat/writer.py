"""Token shards and their records, written as samples arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ops.lib.data.files import json_line
from ops.lib.data.token_shards import TokenSample, write_token_shard

SHARD_BYTES = 256 * 1024 * 1024  # of pixels kept in memory until a shard is written


class ShardWriter:
    """Collects samples, split by split, and writes a shard whenever it has enough of them.

    shards: their entries in tokens.json; tokens, loss_tokens: of all samples.
    """

    def __init__(self, folder: Path, shard_samples: int, patch_dim: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.shards: list[dict[str, Any]] = []
        self.tokens = 0
        self.loss_tokens = 0
        self._folder = folder
        self._shard_samples = shard_samples
        self._shard_bytes = shard_bytes
        self._patch_dim = patch_dim
        self._samples: list[TokenSample] = []
        self._labels: list[str] = []
        self._bytes = 0
        (folder / "samples.jsonl").touch()

    def add(self, sample: TokenSample, split: str, label: str) -> None:
        """Splits must come one after the other."""
        self._samples.append(sample)
        self._labels.append(label)
        self._bytes += sample.pixel_values.nbytes
        if len(self._samples) == self._shard_samples or self._bytes >= self._shard_bytes:
            self.flush(split)

    def flush(self, split: str) -> None:
        """Write the collected samples as a shard of the split."""
        if not self._samples:
            return
        name = f"{split}-{sum(shard['split'] == split for shard in self.shards):05d}.safetensors"
        write_token_shard(self._folder / name, self._samples, self._patch_dim)
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json_line({**record, "split": split, "shard": name}) for record in self._records())
        tokens = sum(len(sample.input_ids) for sample in self._samples)
        self.shards.append({"file": name, "split": split, "samples": len(self._samples), "tokens": tokens})
        self.tokens += tokens
        self._samples, self._labels, self._bytes = [], [], 0

    def _records(self) -> list[dict[str, Any]]:
        records = []
        for row, (sample, label) in enumerate(zip(self._samples, self._labels, strict=True)):
            loss_tokens = int(sample.loss_mask.sum())
            self.loss_tokens += loss_tokens
            records.append(
                {
                    "id": sample.id,
                    "category": sample.category,
                    "row": row,
                    "tokens": len(sample.input_ids),
                    "prompt_tokens": sample.prompt_tokens,
                    "loss_tokens": loss_tokens,
                    "label": label,
                }
            )
        return records
