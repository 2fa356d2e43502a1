"""The loss of a training under sequence parallelism compared with the same training on one process, step by step.

    python benchmarks/sp_curve.py --store runs --steps 50 --figure docs/sp_loss_curves.png

Uses the newest run of the store (or `--run`), in which all ancestors of the node of train_dflash are done, and trains
its first steps in a temporary folder: on one process, and on `--degree` gloo ranks that share every sequence, with each
exchange. The schedule is that of the whole training; nothing is written to the store. Prints the largest relative
difference of the loss over the steps, and draws the curves. Exits with 1 if it is more than `--within`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from attrs import evolve
from matplotlib.figure import Figure

from benchmarks.sides.stage import FolderStage
from dsl.errors import DflowError, StopRequested
from dsl.stage import LOOPBACK_ONLY, RENDEZVOUS
from executor.keys.node_key import node_inputs
from executor.records.run_record import find_record
from executor.store.artifact_store import Store, store_path
from ops.lib.data.files import read_json, write_json
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash


class CurveStage(FolderStage):
    """A stage that stops the training after `steps` steps, and keeps the pair (step, loss) of each."""

    def __init__(self, folder: Path, inputs: Mapping[str, Any], rank: int, world_size: int, steps: int) -> None:
        super().__init__(folder, inputs, rank, world_size)
        self.steps = steps
        self.losses: list[tuple[int, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "train/loss" in metrics:
            self.losses.append((step, metrics["train/loss"]))

    def progress(self, done: int, total: int) -> None:
        if self.rank == 0 and sys.stderr.isatty():
            print(f"\rstep {done} of {min(self.steps, total)} ", end="", file=sys.stderr, flush=True)

    def stop_requested(self) -> bool:
        return len(self.losses) >= self.steps


def main() -> int:
    options = _options()
    try:
        config, inputs = training(Store.open(store_path(options.store, None), write=False), options.run)
    except DflowError as error:
        print(f"sp_curve: {error}", file=sys.stderr)
        return 2
    alone = curve(config, inputs, options.steps, ranks=1)
    print(f"one process: loss {alone[0]:.6f} at step 1, {alone[-1]:.6f} at step {len(alone)}")
    shared: dict[str, list[float]] = {}
    for exchange in options.exchange:
        shared[exchange] = curve(evolve(config, sp_exchange=exchange), inputs, options.steps, ranks=options.degree)
        worst = max(differences(alone, shared[exchange]))
        print(f"sp_degree {options.degree}, {exchange}: differs by at most {worst:.2e}, relative")
    if options.figure is not None:
        draw(alone, shared, options.degree).savefig(options.figure, dpi=150)
    largest = max(max(differences(alone, losses)) for losses in shared.values())
    print(f"largest relative difference over {len(alone)} steps: {largest:.2e} (at most {options.within:g} allowed)")
    return 0 if largest <= options.within else 1


def training(store: Store, run: str | None) -> tuple[TrainDflash, dict[str, Any]]:
    """Find a run's only train_dflash node: its config and input artifacts. Raises DflowError if they are missing."""
    record = find_record(store.records, run)
    graph, states = record.graph(), record.state.nodes
    nodes = [node for node in graph.nodes.values() if isinstance(node.config, TrainDflash)]
    if len(nodes) != 1:
        raise DflowError(f"run {record.run} has {len(nodes)} nodes of train_dflash; it must have one")
    (node,) = nodes
    inputs: dict[str, Any] = {}
    for name, digest in node_inputs(node, lambda parent: states[parent].digest).items():
        if digest is None and node.inputs.get(name):
            raise DflowError(f'run {record.run}: "{node.inputs[name][0]}" above "{node.id}" is not done')
        inputs[name] = None if digest is None else node.op.edges[name].type(store.object_path(digest), digest)
    never = 10**9  # not None, which a config that selects by a measurement rejects
    return evolve(node.config, log_every=1, checkpoint_every=never, eval_every=node.config.eval_every and never), inputs


def curve(config: TrainDflash, inputs: Mapping[str, Any], steps: int, ranks: int) -> list[float]:
    """Train the first steps in `ranks` fresh processes with one thread each; returns the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        # The server imports torch once for all; it never computes, so forking it is safe.
        multiprocessing.set_forkserver_preload(["ops.train_dflash.run"])
        arguments = (config, inputs, steps, ranks, Path(folder))
        mp.start_processes(one_rank, arguments, nprocs=ranks, start_method="forkserver")
        return read_json(Path(folder) / "losses.json")


def one_rank(rank: int, config: TrainDflash, inputs: Mapping[str, Any], steps: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {RENDEZVOUS: str(folder / "store"), **LOOPBACK_ONLY}
    stage = CurveStage(folder, inputs, rank, ranks, steps)
    with suppress(StopRequested):
        train_dflash(config, stage)
    if rank == 0:
        write_json(folder / "losses.json", [loss for _, loss in sorted(stage.losses)])


def differences(alone: Sequence[float], shared: Sequence[float]) -> list[float]:
    """The relative difference of the losses in every step, |shared - alone| / alone."""
    return [abs(theirs - ours) / ours for ours, theirs in zip(alone, shared, strict=True)]


def draw(alone: Sequence[float], shared: Mapping[str, Sequence[float]], degree: int) -> Figure:
    """Draw all loss curves, and below them each one's relative difference from that of one process."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(alone) + 1)
    above.plot(steps, alone, color="black", linewidth=3, alpha=0.3, label="one process")
    for style, (exchange, losses) in zip(("-", "--", ":"), shared.items(), strict=False):
        above.plot(steps, losses, linestyle=style, linewidth=1, label=f"sp_degree {degree}, {exchange}")
        below.plot(steps, differences(alone, losses), linestyle=style, linewidth=1)
    above.set(ylabel="loss", title="Loss of the draft on one process and under sequence parallelism")
    above.legend()
    below.axhline(1e-4, color="grey", linewidth=0.8)
    below.set(xlabel="step", ylabel="relative difference", yscale="log", ylim=(1e-12, 1e-3))
    below.grid(alpha=0.3)
    return figure


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", help="as for dflow; default: DFLOW_STORE or ./runs")
    parser.add_argument("--run", help="the run of the training; default: the newest")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--degree", type=int, default=2, help="ranks that share every sequence")
    parser.add_argument("--exchange", nargs="+", default=["ulysses", "gather"], choices=["ulysses", "gather", "auto"])
    parser.add_argument("--within", type=float, default=1e-4, help="largest relative difference allowed")
    parser.add_argument("--figure", type=Path, help="where to draw the curves (png)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
