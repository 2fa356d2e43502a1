"""A stage without an executor: what a run function sees, with every call to it recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from dsl.op import Artifact
from dsl.stage import PoolRendezvous

A = TypeVar("A", bound=Artifact)


class FakeStage:
    """A dsl.stage.Stage below `folder`; a second one on the same folder resumes with the same work_dir.

    logged      every (metrics, step) given to log
    progressed  every (done, total) given to progress
    figures     name -> figure
    warnings    every text given to warn
    stop_after  stop_requested() is false this many times and true from then on; None: always false
    """

    def __init__(
        self,
        folder: Path,
        inputs: Mapping[str, Any] | None = None,
        *,
        device: str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        sp_degree: int = 1,
        stop_after: int | None = None,
        worker: int = 0,
        workers: int = 1,
        pool: PoolRendezvous | None = None,
        started_before: bool = False,
    ) -> None:
        self.inputs: Mapping[str, Any] = dict(inputs or {})
        self.out_dir = folder / "out"
        self.work_dir = folder / "work"
        self.out_dir.mkdir(parents=True, exist_ok=True)
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.sp_degree = sp_degree
        self.worker = worker
        self.workers = workers
        self.pool = pool
        self.started_before = started_before
        self.shared_dir = folder / "shared"
        self.shared_dir.mkdir(exist_ok=True)
        self.stop_after = stop_after
        self.stop_asked = 0
        self.logged: list[tuple[dict[str, float], int]] = []
        self.progressed: list[tuple[int, int]] = []
        self.figures: dict[str, Any] = {}
        self.warnings: list[str] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.append((dict(metrics), step))

    def progress(self, done: int, total: int) -> None:
        self.progressed.append((done, total))

    def info(self, text: str) -> None:
        print(f"info: {text}")

    def warn(self, text: str) -> None:
        print(f"warning: {text}")
        self.warnings.append(text)

    def figure(self, name: str, fig: Any) -> None:
        self.figures[name] = fig

    def lost_workers(self) -> frozenset[int]:
        """The numbers of the workers whose file `lost-NUMBER` a test has written beside shared_dir."""
        return frozenset(int(file.name.removeprefix("lost-")) for file in self.shared_dir.parent.glob("lost-*"))

    def stop_requested(self) -> bool:
        self.stop_asked += 1
        return self.stop_after is not None and self.stop_asked > self.stop_after

    def artifact(self, artifact_type: type[A]) -> A:
        """The artifact in out_dir, as the input of a later op."""
        return artifact_type(path=self.out_dir, digest=folder_digest(self.out_dir))

    def metric(self, name: str) -> list[float]:
        """The values logged under a name, in order."""
        return [metrics[name] for metrics, _ in self.logged if name in metrics]


def folder_digest(folder: Path) -> str:
    """The SHA-256 over names and contents of all files below a folder, except measurements.json and manifest.json."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        if file.name not in ("measurements.json", "manifest.json"):
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
