"""A shard while it is in memory.

T tokens of a shard, L layers, M hidden size, F = L * M
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
from ops.lib.target.float8 import StateRows

SETTING = "dtype of capture_targets"
CPU = torch.device("cpu")

PINNED = 2**30  # bytes; torch rounds pinned memory up to a power of two and never gives it back


class Shard:
    """The states of consecutive samples at some layers, on the CPU, in the stored dtype.

    States on a GPU are copied to pinned memory while the GPU computes the next batch. A larger shard, of a single
    sample longer than `shard_tokens`, is not pinned: its few copies wait. float8: encode the states, on the device that
    they are on, and measure the error.
    """

    def __init__(
        self, lengths: Sequence[int], dtype: torch.dtype, layer_ids: Sequence[int], *, float8: bool = False
    ) -> None:
        self._lengths = list(lengths)
        self._ids = [""] * len(lengths)
        self._layers = layer_parts(layer_ids)
        self._offsets = [0, *accumulate(lengths)]
        self._dtype = dtype
        self._input_ids_T = torch.empty(self._offsets[-1], dtype=torch.int64)
        self._loss_mask_T = torch.empty(self._offsets[-1], dtype=torch.bool)
        self._float8 = float8
        self._features: StateRows | None = None
        self._final_hidden: StateRows | None = None
        self._copied: torch.cuda.Event | None = None  # recorded after all copies so far

    def put(self, row: int, sample: TokenSample, states: States) -> None:
        """Store the states of a sample; row: its index among the samples of the shard."""
        here = slice(self._offsets[row], self._offsets[row + 1])
        self._ids[row] = sample.id
        self._input_ids_T[here], self._loss_mask_T[here] = sample.input_ids, sample.loss_mask
        self._features = self._features or self._rows(states.features, len(self._layers))
        self._features.put(here, states.features)
        if states.final_hidden is not None:
            self._final_hidden = self._final_hidden or self._rows(states.final_hidden, 1)
            self._final_hidden.put(here, states.final_hidden)
        if states.features.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def write(self, path: Path, worker: int = 0) -> None:
        """Write the shard's file, which appears whole or not at all. Raises DataError for states that are
        not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        assert self._features is not None
        features, errors, final_hidden = self._features.states, self._features.errors(), None
        rows = list(zip(self._ids, self._lengths, strict=True))
        check_finite(features, rows, self._layers, SETTING, self._dtype)
        if self._final_hidden is not None:
            final_hidden = self._final_hidden.states
            errors += self._final_hidden.errors()
            check_finite(final_hidden, rows, FINAL, SETTING, self._dtype)
        partial, offsets = partial_path(path, worker), torch.tensor(self._offsets)
        write_feature_shard(
            partial, features, self._input_ids_T, self._loss_mask_T, offsets, final_hidden, errors=errors
        )
        publish(partial, path)

    def _rows(self, states: Tensor, layers: int) -> StateRows:
        """Memory for the whole shard; states: those of its first sample."""
        shape = (self._offsets[-1], states.shape[1])
        size = prod(shape) * (1 if self._float8 else self._dtype.itemsize)
        pinned = states.is_cuda and size <= PINNED
        return StateRows(shape, layers, self._dtype, CPU, float8=self._float8, pinned=pinned)
