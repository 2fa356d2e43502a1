"""Checkpoints written by a thread while the steps continue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ops.lib.training.checkpoint import (
    Kept,
    TrainState,
    content_of,
    load_checkpoint,
    note_metric,
    snapshot,
    write_checkpoint,
)


class Checkpoints:
    """The checkpoints of a training; every rank creates one and calls the same methods in the same order.

    A step waits only for the copy to host memory: rank 0 keeps that copy until it is written, so there is at most
    one. An error while writing is raised on rank 0 by the next call. A context manager, so that nothing is
    left half-written when the training ends; if it ends with an error, a failed write is printed too.
    """

    def __init__(
        self,
        work_dir: Path,
        identity: Mapping[str, Any],
        *,
        rank: int,
        kept: Kept | None = None,
        info: Callable[[str], None] = print,
    ) -> None:
        self.work_dir = work_dir
        self.identity = identity
        self.kept = kept or Kept()
        self._info = info
        self._writes = rank == 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._saved: int | None = None  # the step of the newest checkpoint

    def load(self, state: TrainState) -> bool:
        """Restores the newest whole checkpoint; False if there is none. See load_checkpoint."""
        found = load_checkpoint(self.work_dir, state, self.identity, self._info)
        if found:
            self._saved = state.step
        return found

    def save(self, state: TrainState, metric: float | None = None) -> None:
        """Copies the state once the previous write is done, and starts writing it.

        metric: measured at this step; the lowest marks the best checkpoint. A step that is already saved
        is not written again, unless a metric is given.
        """
        self._finish()
        if metric is not None:
            note_metric(state, metric)
        if state.step == self._saved and metric is None:
            return
        tensors = snapshot(state, copy=self._writes)
        self._saved = state.step
        if self._writes:
            content = content_of(state, self.identity)
            self._pending = self._pool.submit(write_checkpoint, self.work_dir, tensors, content, self.kept)

    def wait(self) -> None:
        """Returns when the saved state is on disk, on every rank."""
        self._finish()
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """Ends the thread after its pending write, without waiting for other ranks."""
        self._pool.shutdown()
        self._finish()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._pool.shutdown()
        failed = self._pending.exception() if self._pending else None
        if failed is not None:
            print(f"the checkpoint of step {self._saved} was not written either: {failed}", flush=True)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
