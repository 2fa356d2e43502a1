"""Fine-tuning in processes of its own, in FOLDER, which holds inputs.json: path and digest of the tokens, and `init`.

    python tests/support/training/finetune_worker.py kill FOLDER

is killed by kill -9 once the checkpoint of the first step is written.

    python tests/support/training/finetune_worker.py ranks FOLDER

is one of the two ranks that tests/ops/finetune_vlm/test_finetune_ranks.py starts, and trains the cases of RANK_CASES,
each in a folder of its name; what a case logs goes into logged.json there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from fake_stage import FakeStage
from finetune_cases import RANK_CASES, config

from dsl.errors import ConfigError
from ops.artifacts import TokenShards
from ops.finetune_vlm.run import finetune_vlm
from ops.lib.data.files import read_json
from ops.lib.training import rank_group
from ops.lib.training.checkpoint import checkpoints


class Killed(FakeStage):
    def progress(self, done: int, total: int) -> None:
        if done == 0:
            return
        while not checkpoints(self.work_dir):  # written by a thread
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def kill(folder: Path) -> None:
    finetune_vlm(config(checkpoint_every=1), Killed(folder, _tokens(folder)))


def on_ranks(folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with rank_group.joined(FakeStage(folder / "scratch", rank=rank, world_size=world_size)):
        for name, case in RANK_CASES.items():
            stage = FakeStage(
                folder / name, _tokens(folder), rank=rank, world_size=world_size, sp_degree=case.sp_degree
            )
            refused = ""
            try:
                finetune_vlm(config(init=read_json(folder / "inputs.json")["init"], **case.changes), stage)
            except ConfigError as error:
                refused = str(error)
            if rank == 0:
                seen = {"logged": stage.logged, "refused": refused}
                (folder / name / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


def _tokens(folder: Path) -> dict[str, TokenShards]:
    inputs = read_json(folder / "inputs.json")
    return {"tokens": TokenShards(Path(inputs["tokens"]), inputs["digest"])}


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"kill": kill, "ranks": on_ranks}[sys.argv[1]](Path(sys.argv[2]))
