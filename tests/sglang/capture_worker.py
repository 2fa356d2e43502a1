"""One rank of a capture in a process of its own: `python capture_worker.py JOB [COUNT]`, alone or under torchrun.

JOB is a JSON file: {"folder", "tokens", "target": folders, "config": fields of CaptureTargets}. COUNT: it is killed by
kill -9 once so many shards are made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import TargetModel, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets


class Killed(FakeStage):
    """count: of the shards that are made when it is killed."""

    count = 0

    def progress(self, done: int, total: int) -> None:
        if len(list(self.work_dir.glob("*.safetensors"))) >= self.count:
            os.kill(os.getpid(), signal.SIGKILL)


def write_job(file: Path, folder: Path, tokens: TokenShards, target: TargetModel, **config: Any) -> None:
    job = {"folder": str(folder), "tokens": str(tokens.path), "target": str(target.path), "config": config}
    file.write_text(json.dumps(job))


def capture(file: Path, stages: type[FakeStage], rank: int, world_size: int) -> None:
    """A rank's part of the job, with a stage of this class."""
    torch.set_num_threads(1)
    job = json.loads(file.read_text())
    stage = stages(
        Path(job["folder"]),
        {"tokens": TokenShards(Path(job["tokens"]), "tokens"), "target": TargetModel(Path(job["target"]), "target")},
        rank=rank,
        world_size=world_size,
    )
    references = {"tokens": Ref("tokenize"), "target": Ref("target")}
    config = {name: tuple(value) if isinstance(value, list) else value for name, value in job["config"].items()}
    capture_targets(CaptureTargets(**references, **config), stage)


def main(file: Path, count: int = 0) -> None:
    Killed.count = count
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    capture(file, Killed if count else FakeStage, rank, world_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
