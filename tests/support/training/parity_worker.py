"""One rank of the parity test, one of four that tests/ops/train_dflash/test_parallel_parity.py starts.

FOLDER holds what `parity_cases.write_inputs` wrote. First every rank is a process of its own and takes its part of the
problems alone; then the four ranks take the layouts of four, and at last two pairs, side by side, those of two. The
figures of a problem and layout go into rank-N.json of the rank that compared them, all else that a rank saw too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from draft_chain import train_config
from fake_stage import FakeStage
from parity_bugs import BUGS
from parity_cases import (
    G22,
    MUON,
    ONE,
    PROBLEMS,
    REFUSED,
    STOP_AFTER,
    TABLE,
    U22,
    WHOLE,
    Layout,
    Problem,
    read_inputs,
    train_values,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsl.errors import ConfigError, StopRequested
from ops.lib.drafts.backbone.reference import Sample, reference_step
from ops.lib.training import rank_group
from ops.lib.training.dtensors import local, reshard
from ops.lib.training.optimizer import clip_gradients, make_optimizer, set_rate
from ops.train_dflash import hardware
from ops.train_dflash.engine import Setup, set_up
from ops.train_dflash.inputs import Inputs, open_inputs
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash
from ops.train_dflash.step import train_step
from ops.train_dflash.tally import WEIGHT, mean_loss, slot_accuracy

RANKS = 4


@frozen(eq=False)
class Outcome:
    """The outcome of some steps: losses, slots' accuracies, first and last gradients, and the final weights.

    padded: the share of this dp row's micro-batches in the first steps whose context P does not divide. start: the
    weights before the steps, where they are needed.
    """

    losses: list[float]
    accuracies: list[list[float]]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    weights: dict[str, Tensor]
    padded: float
    start: dict[str, Tensor] = field(factory=dict)


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    hardware.SIZES["cpu"] = 64  # the peak is of no interest here, and its measurement takes a second
    worker = _Worker(folder, rank)
    worker.alone()
    with rank_group.joined(FakeStage(folder / "scratch", rank=rank, world_size=RANKS)):
        worker.on_four()
    pair, place = divmod(rank, 2)
    store = dist.FileStore(str(folder / f"pair-{pair}"), 2)
    dist.init_process_group("gloo", store=store, rank=place, world_size=2)
    worker.on_two(pair, place)
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(worker.seen))


@frozen
class _Worker:
    folder: Path
    rank: int
    seen: dict[str, Any] = field(factory=dict)

    def alone(self) -> None:
        """Run one process's share of the problems and trainings, the first step of each problem against the
        reference.
        """
        for problem in PROBLEMS[self.rank :: RANKS]:
            config, inputs, setup = self._opened(problem, ONE, 0)
            outcome = take_steps(config, inputs, setup, problem.steps, 1)
            torch.save(outcome, self._alone(problem, "float64"))
            self.seen[f"{problem.name} | reference"] = against_reference(config, inputs, setup, outcome)
            if problem.float32:
                torch.save(self._outcome(problem, ONE, 0, "float32"), self._alone(problem, "float32"))
        if self.rank == 2:
            self._train("uninterrupted", ONE, 0)
        if self.rank == 3:
            self._train("one then four", ONE, 0, stop=True)

    def on_four(self) -> None:
        for problem, layout in layouts_of(4):
            self._compare(problem, layout, self.rank)
        for name, bug in BUGS.items():
            for layout in (U22, G22):
                config, inputs, setup = self._opened(TABLE[2], layout, self.rank)
                with bug(setup.engine):
                    outcome = take_steps(config, inputs, setup, 1, RANKS)
                off = norm_off(self._expected(TABLE[2]).first, outcome.first)
                self.seen[f"bug | {name} | {layout.exchange}"] = off
        self._train("one then four", G22, self.rank)
        self._train("four", U22, self.rank)
        self._train("four then one", U22, self.rank, stop=self.rank == 1)
        self._refused()

    def on_two(self, pair: int, place: int) -> None:
        """Run the layouts of two ranks, every second one on each of the two pairs."""
        for problem, layout in list(layouts_of(2))[pair::2]:
            self._compare(problem, layout, place)

    def _compare(self, problem: Problem, layout: Layout, rank: int) -> None:
        outcome = self._outcome(problem, layout, rank, "float64")
        figures = compared(self._expected(problem), outcome)
        if problem.float32:
            single = self._outcome(problem, layout, rank, "float32")
            figures["float32"] = norm_off(
                torch.load(self._alone(problem, "float32"), weights_only=False).first, single.first
            )
        if problem.bfloat16:
            half = self._outcome(problem, layout, rank, "bfloat16")
            figures["bfloat16"] = norm_off(self._expected(problem).first, half.first)
        if problem is MUON:
            figures["muon"] = norm_off(self._moved(self._expected(problem)), self._moved(outcome))
        if rank == 0:
            self.seen[f"{problem.name} | {layout} | {layout.exchange}"] = figures

    def _outcome(self, problem: Problem, layout: Layout, rank: int, dtype: str) -> Outcome:
        changed = evolve(problem, changes={**problem.changes, "dtype": dtype})
        config, inputs, setup = self._opened(changed, layout, rank)
        return take_steps(config, inputs, setup, problem.steps if dtype == "float64" else 1, layout.ranks)

    def _opened(self, problem: Problem, layout: Layout, rank: int) -> tuple[TrainDflash, Inputs, Setup]:
        config = train_config(**train_values(problem), sp_exchange=layout.exchange)
        found = read_inputs(self.folder, problem.inputs)
        stage = FakeStage(self.folder / "scratch", found, rank=rank, world_size=layout.ranks, sp_degree=layout.sp)
        inputs = open_inputs(config, stage)
        return config, inputs, set_up(config, stage, inputs)

    def _train(self, name: str, layout: Layout, rank: int, stop: bool = False) -> None:
        """Run a whole training in FOLDER/name; it resumes where an earlier one of that name was stopped."""
        stage = FakeStage(
            self.folder / name,
            read_inputs(self.folder, "whole"),
            rank=rank,
            world_size=layout.ranks,
            sp_degree=layout.sp,
            stop_after=STOP_AFTER if stop else None,
        )
        key = f"training | {name} | {layout}"
        try:
            train_dflash(train_config(**WHOLE, sp_exchange=layout.exchange), stage)
        except StopRequested as error:
            self.seen[f"{key} | stopped"] = str(error)
        self.seen[key] = stage.logged

    def _refused(self) -> None:
        for name, (inputs, degree, changes, _) in REFUSED.items():
            found = read_inputs(self.folder, inputs)
            stage = FakeStage(self.folder / "scratch", found, rank=self.rank, world_size=RANKS, sp_degree=degree)
            try:
                train_dflash(train_config(**changes), stage)
            except ConfigError as error:
                self.seen[f"refused | {name}"] = str(error)

    def _expected(self, problem: Problem) -> Outcome:
        return torch.load(self._alone(problem, "float64"), weights_only=False)

    def _alone(self, problem: Problem, dtype: str) -> Path:
        return self.folder / f"alone {problem.name} {dtype}.pt"

    def _moved(self, outcome: Outcome) -> dict[str, Tensor]:
        return {name: weight - outcome.start[name] for name, weight in outcome.weights.items()}


def layouts_of(count: int) -> Iterator[tuple[Problem, Layout]]:
    return ((problem, layout) for problem in PROBLEMS for layout in problem.layouts if layout.ranks == count)


def take_steps(config: TrainDflash, inputs: Inputs, setup: Setup, count: int, world_size: int) -> Outcome:
    """Run the first `count` steps of the plan, updates included; all ranks get the whole tensors."""
    model = setup.engine.model
    start = whole(dict(model.named_parameters())) if world_size == 1 or config.optimizer == "muon" else {}
    optimizer = make_optimizer(model, config.weight_decay, kind=config.optimizer)
    losses, accuracies, gradients = [], [], []
    stream = setup.train.steps(inputs.steps[:count], config.seed)
    for step in range(count):
        optimizer.zero_grad(set_to_none=True)
        tally = train_step(setup.engine, stream, world_size)
        losses.append(mean_loss(tally))
        accuracies.append(slot_accuracy(tally, inputs.draft.algorithm.metrics(config.needs_teacher)))
        if tally[WEIGHT] == 0:
            continue
        if not gradients or step == count - 1:
            gradients.append(whole({name: parameter.grad for name, parameter in model.named_parameters()}))
        clip_gradients(model.parameters(), config.grad_clip)
        set_rate(optimizer, config.lr)
        optimizer.step()
    reshard(model)
    weights = whole(dict(model.named_parameters()))
    return Outcome(losses, accuracies, gradients[0], gradients[-1], weights, padded_share(config, inputs, setup), start)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each sharded tensor in full, from one exchange. FSDP2 shards dimension 0, in the order of the ranks."""
    parts = [{name: local(tensor).clone() for name, tensor in tensors.items()}]
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        parts = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, {name: local(tensor) for name, tensor in tensors.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in tensors}


def padded_share(config: TrainDflash, inputs: Inputs, setup: Setup) -> float:
    """The share of this dp row's micro-batches whose packed context is no multiple of the degree."""
    place = setup.place
    sizes = [
        sum(sample.prefix for sample in samples) % place.sp_degree
        for step in inputs.steps[:5]
        for samples in setup.train.batches(setup.train.drawn(step, config.seed), place.dp_rank)
    ]
    return sum(size > 0 for size in sizes) / max(1, len(sizes))


def against_reference(config: TrainDflash, inputs: Inputs, setup: Setup, outcome: Outcome) -> dict[str, float]:
    """Compare loss and gradient of the first step that has an anchor with the dense reference, for equal weights."""
    steps = (setup.train.drawn(step, config.seed) for step in inputs.steps)
    number, drawn = next(
        (number, drawn) for number, drawn in enumerate(steps) if any(len(one.anchors_A) for one in drawn)
    )
    samples = []
    for one in drawn:
        input_ids_S, loss_mask_S = inputs.train.labels(one.index)
        teacher_SM = inputs.train.final_hidden(one.index, 0, one.length) if config.needs_teacher else None
        features_SF = inputs.train.features(one.index, 0, one.length)
        samples.append(Sample(features_SF, input_ids_S, loss_mask_S, one.anchors_A, teacher_SM))
    weights = {name: tensor.clone().requires_grad_() for name, tensor in outcome.start.items()}
    ends = (setup.engine.embed_VM, inputs.head.weight_VM)
    given = {"kind": config.loss, "own": config.terms, "teacher": inputs.head.teacher}
    step = reference_step(weights, inputs.draft, *ends, samples, **given)
    gradients = torch.autograd.grad(step.loss, list(weights.values()), materialize_grads=True)
    accuracy = (step.correct_K / step.seen_K.clamp(min=1).double())[1:].tolist()
    expected = dict(zip(weights, gradients, strict=True))
    return {
        "loss": abs(outcome.losses[number] / float(step.loss.detach()) - 1),
        "accuracy": max(abs(a - b) for a, b in zip(accuracy, outcome.accuracies[number], strict=True)),
        "first": farthest(expected, outcome.first),
    }


def compared(expected: Outcome, got: Outcome) -> dict[str, float]:
    """The largest differences of two outcomes; see `farthest`."""
    losses = zip(expected.losses, got.losses, strict=True)
    accuracies = zip(chain(*expected.accuracies), chain(*got.accuracies), strict=True)
    return {
        "loss": max(abs(a - b) / (abs(a) or 1) for a, b in losses),
        "accuracy": max(abs(a - b) for a, b in accuracies),
        "first": farthest(expected.first, got.first),
        "last": farthest(expected.last, got.last),
        "weights": farthest(expected.weights, got.weights),
        "padded": got.padded,
    }


def farthest(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """The largest difference of an element, absolute or relative to its tensor's largest element, the larger of
    both.
    """
    if expected.keys() != got.keys():
        raise ValueError(f"{expected.keys() ^ got.keys()} on one side only")
    return max(
        float((got[name] - tensor).abs().max()) / min(1.0, float(tensor.abs().max()) or 1.0)
        for name, tensor in expected.items()
    )


def norm_off(expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """The norm of the difference of all tensors over the norm of the expected ones."""
    off = torch.stack([(got[name] - tensor).norm() for name, tensor in expected.items()]).norm()
    return float(off / torch.stack([tensor.norm() for tensor in expected.values()]).norm())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
