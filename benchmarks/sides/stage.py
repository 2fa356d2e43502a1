"""A stage without an executor, for ops that a benchmark calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FolderStage:
    """A dsl.stage.Stage on the CPU that reports nothing; its folders are created in `folder`."""

    device = "cpu"
    started_before = False

    def __init__(self, folder: Path, inputs: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> None:
        self.inputs, self.rank, self.world_size, self.sp_degree = inputs, rank, world_size, world_size
        self.worker, self.workers, self.pool = 0, 1, None
        self.out_dir, self.work_dir, self.shared_dir = folder / "out", folder / "work", folder / "shared"
        for made in (self.out_dir, self.work_dir, self.shared_dir):
            made.mkdir(parents=True, exist_ok=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        pass

    def info(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def figure(self, name: str, fig: Any) -> None:
        pass

    def lost_workers(self) -> frozenset[int]:
        return frozenset()

    def stop_requested(self) -> bool:
        return False
