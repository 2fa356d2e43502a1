"""A shard while it is in memory, and the thread that writes one while the next is captured.

T tokens of a shard, F = layers * hidden size, M hidden size
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ops.capture_targets.backend import States
from ops.lib.data.files import finish_file
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.feature_shards import write_feature_shard


class Shard:
    """The states of consecutive samples of these lengths, on the CPU, in the stored dtype.

    What comes from a GPU is copied to pinned memory without waiting: the GPU goes on with the next batch meanwhile.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self._offsets = [0, *accumulate(lengths)]
        self._dtype = dtype
        self._input_ids_T = torch.empty(self._offsets[-1], dtype=torch.int64)
        self._loss_mask_T = torch.empty(self._offsets[-1], dtype=torch.bool)
        self._features_TF: Tensor | None = None
        self._final_TM: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # comes behind all copies so far

    def put(self, row: int, sample: TokenSample, states: States) -> None:
        """Take what was captured of a sample; row: its place among the samples of the shard."""
        here = slice(self._offsets[row], self._offsets[row + 1])
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

    def write(self, path: Path) -> None:
        """Write the file, which appears whole or not at all."""
        if self._copied is not None:
            self._copied.synchronize()
        assert self._features_TF is not None
        partial, offsets = path.with_suffix(".partial"), torch.tensor(self._offsets)
        write_feature_shard(partial, self._features_TF, self._input_ids_T, self._loss_mask_T, offsets, self._final_TM)
        finish_file(partial, path)

    def _empty(self, states: Tensor) -> Tensor:
        return torch.empty(self._offsets[-1], states.shape[1], dtype=self._dtype, pin_memory=states.is_cuda)


class ShardWriter:
    """Writes shards in a thread, one at a time: with the one being captured, two are in memory at most.

    What fails while writing is raised by the next call. Used as a context manager: at its end every shard that was
    given is on disk; where it ends by an error, a write that failed as well is printed.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._pending: Future[None] | None = None
        self._path: Path | None = None

    def write(self, shard: Shard, path: Path) -> None:
        """Have the shard written, after the one before it is."""
        self.finish()
        self._pending, self._path = self._pool.submit(shard.write, path), path

    def finish(self) -> None:
        """Returns when everything given is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if error is None:
            self.finish()
            return
        failed = self._pending.exception() if self._pending else None
        if failed is not None:
            print(f"{self._path} was not written either: {failed}", flush=True)
