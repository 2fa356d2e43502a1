"""One rank of the trainings that capture on ranks of their own, one of four.

tests/ops/train_dflash/test_online_ranks.py starts them.

A scenario takes the first ranks of the launch; what each of them saw goes into FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from fake_stage import FakeStage

from dsl.errors import StopRequested
from dsl.op import Ref
from ops.artifacts import BatchPlan, TargetModel, TokenShards
from ops.train_dflash import hardware
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

RANKS = 4
TYPES = {"tokens": TokenShards, "target": TargetModel, "batches": BatchPlan}
VALUES = {
    "capture": "online",
    "block_size": 8,
    "num_layers": 1,
    "num_anchors": 8,
    "max_steps": 8,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 3,
    "eval_prompts": 1,
    "eval_new_tokens": 6,
    "micro_batch_tokens": 256,
    "seed": 0,
}


@frozen
class Scenario:
    """A training with capture on other ranks.

    trainers of `ranks` train; stop: rank -> the number of checks after which it is asked to stop. place: the folder.
    """

    name: str
    ranks: int
    trainers: int
    sp_degree: int = 1
    stop: int | None = None
    place: str = ""


SCENARIOS = (
    Scenario("one", 2, 1),
    Scenario("stopped", 2, 1, stop=0, place="resumed"),
    Scenario("resumed", 2, 1),
    Scenario("stopped by the rank that captures", 2, 1, stop=1),
    Scenario("two", 3, 2),
    Scenario("shared sequences", 4, 2, sp_degree=2),
    Scenario("one row, three ranks that capture", 4, 1),
)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    hardware.SIZES["cpu"] = 64  # the peak is of no interest here, and its measurement takes a second
    listed = json.loads((folder / "inputs.json").read_text())
    inputs = {name: TYPES[name](path=Path(path), digest=digest) for name, (path, digest) in listed.items()}
    store = dist.FileStore(str(folder / "scenarios"), RANKS)
    seen = {}
    for scenario in SCENARIOS:
        if rank < scenario.ranks:
            seen[scenario.name] = run(scenario, folder, inputs, rank)
        # One job at a time: two would look for each other's ranks.
        if store.add(f"{scenario.name} done", 1) == RANKS:
            store.set(scenario.name, "")
        store.wait([scenario.name])
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))


def run(scenario: Scenario, folder: Path, inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run one rank of a scenario; returns the error's message, if any, and what was logged."""
    # The environment's own place can be joined once in a launch: by the training on two ranks.
    grouped = scenario.name == "shared sequences" and rank < scenario.trainers
    if grouped:
        store = dist.FileStore(str(folder / "group"), scenario.trainers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=scenario.trainers)
    stage = FakeStage(
        folder / (scenario.place or scenario.name),
        inputs,
        rank=rank,
        world_size=scenario.ranks,
        sp_degree=scenario.sp_degree,
        stop_after=3 if scenario.stop == rank else None,
    )
    references = {name: Ref(name) for name in inputs}
    error = ""
    try:
        train_dflash(TrainDflash(**references, **VALUES, capture_ranks=scenario.ranks - scenario.trainers), stage)
    except StopRequested as raised:
        error = f"{type(raised).__name__}: {raised}"
    if grouped:
        dist.barrier()
        dist.destroy_process_group()
    return {"error": error, "logged": stage.logged, "progressed": stage.progressed}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
