"""A rank of two that share every sequence, with and without a pool: tests/ops/train_dflash/test_pool_training.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from attrs import evolve
from fake_stage import FakeStage
from pool_cases import rendezvous
from pool_trainings import config_of, read_inputs

from ops.lib.training import rank_group
from ops.train_dflash import hardware
from ops.train_dflash.run import train_dflash


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    hardware.SIZES["cpu"] = 64  # the peak is of no interest here, and its measurement takes a second
    inputs = read_inputs(folder)
    config = config_of(inputs)
    stage = FakeStage(folder / "sp alone", inputs, rank=rank, world_size=2, sp_degree=2)
    with rank_group.joined(stage):  # the environment's rendezvous can be joined once
        train_dflash(config, stage)
        for name in ("sp pool", "sp teacher alone", "sp teacher pool"):
            pool = rendezvous(folder / name, 2) if name.endswith("pool") else None
            stage = FakeStage(folder / name, inputs, rank=rank, world_size=2, sp_degree=2, pool=pool)
            train_dflash(evolve(config, loss="kl") if "teacher" in name else config, stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
