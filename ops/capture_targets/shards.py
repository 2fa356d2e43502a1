"""Feature shards on disk: written once, read through the memory map.

T tokens of a shard, S tokens of a sample, N samples of a shard, F = layers * hidden size
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TargetFeatures
from ops.files import read_json


@frozen
class FeatureSample:
    """features [S, F] in the stored dtype; input_ids int64 [S]; loss_mask bool [S]."""

    features: Tensor
    input_ids: Tensor
    loss_mask: Tensor


def write_feature_shard(
    path: Path, features: Tensor, input_ids: Tensor, loss_mask: Tensor, token_offsets: Tensor
) -> None:
    """Write features [T, F], input_ids [T], loss_mask [T] and token_offsets [N + 1] as one safetensors file."""
    save_file(
        {
            "features": features.contiguous(),
            "input_ids": input_ids.to(torch.int32),
            "loss_mask": loss_mask.to(torch.uint8),
            "token_offsets": token_offsets.to(torch.int64),
        },
        path,
    )


class FeatureReader:
    """The samples of one split of a TargetFeatures artifact, in order; each read touches only its own rows."""

    def __init__(self, features: TargetFeatures, split: str) -> None:
        self.info: dict[str, Any] = read_json(features.path / "features.json")
        self.lengths: list[int] = []
        self._rows: list[tuple[Path, int, int]] = []
        for shard in self.info["shards"]:
            if shard["split"] != split:
                continue
            path = features.path / shard["file"]
            with safe_open(path, framework="pt") as tensors:
                offsets = tensors.get_tensor("token_offsets").tolist()
            if len(offsets) != shard["samples"] + 1:
                raise DataError(f"{path}: {len(offsets) - 1} samples, but features.json says {shard['samples']}")
            for start, end in pairwise(offsets):
                self._rows.append((path, start, end))
                self.lengths.append(end - start)

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int) -> FeatureSample:
        path, start, end = self._rows[index]
        with safe_open(path, framework="pt") as tensors:
            return FeatureSample(
                features=tensors.get_slice("features")[start:end],
                input_ids=tensors.get_slice("input_ids")[start:end].long(),
                loss_mask=tensors.get_slice("loss_mask")[start:end].bool(),
            )
