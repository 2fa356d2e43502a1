"""Checkpoints written by a thread while the steps go on."""

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
    """The checkpoints of a training; every rank makes one and calls the same methods in the same order.

    A step stops for the copy to host memory only: rank 0 keeps that copy until it is written, so there is at most
    one. What fails while writing is raised on rank 0 by the next call. Used as a context manager, so that nothing is
    left half-written when the training ends; where it ends by an error, a write that failed as well is printed.
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
        """Bring the state to the newest whole checkpoint; False where there is none. See load_checkpoint."""
        found = load_checkpoint(self.work_dir, state, self.identity, self._info)
        if found:
            self._saved = state.step
        return found

    def save(self, state: TrainState, metric: float | None = None) -> None:
        """Copy the state, after the write before it is done, and have it written.

        metric: what decides about the best checkpoint, the lowest, measured at this step. A step that is saved already
        is not written again, unless a metric comes with it.
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
        """Return when what was saved is on disk, on every rank."""
        self._finish()
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """End the thread once it has written what it was given; no other rank is waited for."""
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
