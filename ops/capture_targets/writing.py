"""A shard while it is in memory.

T tokens of a shard, F = layers * hidden size, M hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ops.capture_targets.backend import States
from ops.lib.data.shared_shards import partial_path, publish
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.feature_shards import FINAL, check_finite, layer_parts, write_feature_shard

SETTING = "dtype of capture_targets"

PINNED = 2**30  # bytes; torch rounds pinned memory up to a power of two and never gives it back


class Shard:
    """The states of consecutive samples at some layers, on the CPU, in the stored dtype.

    States on a GPU are copied to pinned memory while the GPU computes the next batch. A larger shard, of a single
    sample longer than `shard_tokens`, is not pinned: its few copies wait.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, layer_ids: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._ids = [""] * len(lengths)
        self._layers = layer_parts(layer_ids)
        self._offsets = [0, *accumulate(lengths)]
        self._dtype = dtype
        self._input_ids_T = torch.empty(self._offsets[-1], dtype=torch.int64)
        self._loss_mask_T = torch.empty(self._offsets[-1], dtype=torch.bool)
        self._features_TF: Tensor | None = None
        self._final_TM: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # recorded after all copies so far

    def put(self, row: int, sample: TokenSample, states: States) -> None:
        """Store the states of a sample; row: its index among the samples of the shard."""
        here = slice(self._offsets[row], self._offsets[row + 1])
        self._ids[row] = sample.id
        self._input_ids_T[here], self._loss_mask_T[here] = sample.input_ids, sample.loss_mask
        if self._features_TF is None:
            self._features_TF = self._empty(states.features)
        self._features_TF[here].copy_(states.features, non_blocking=True)
        if states.final_hidden is not None:
            if self._final_TM is None:
                self._final_TM = self._empty(states.final_hidden)
            self._final_TM[here].copy_(states.final_hidden, non_blocking=True)
        if states.features.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def write(self, path: Path, worker: int = 0) -> None:
        """Write the shard's file, which appears whole or not at all. Raises DataError for states that are
        not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        assert self._features_TF is not None
        rows = list(zip(self._ids, self._lengths, strict=True))
        check_finite(self._features_TF, rows, self._layers, SETTING)
        if self._final_TM is not None:
            check_finite(self._final_TM, rows, FINAL, SETTING)
        partial, offsets = partial_path(path, worker), torch.tensor(self._offsets)
        write_feature_shard(partial, self._features_TF, self._input_ids_T, self._loss_mask_T, offsets, self._final_TM)
        publish(partial, path)

    def _empty(self, states: Tensor) -> Tensor:
        shape = (self._offsets[-1], states.shape[1])
        pinned = states.is_cuda and prod(shape) * self._dtype.itemsize <= PINNED
        return torch.empty(shape, dtype=self._dtype, pin_memory=pinned)
