"""One rank of a process group: collectives in bfloat16, and a training step sharded by FSDP2 beside one that is not.

nccl on a GPU, gloo on a CPU; the store is in this process, and the backend uses only the loopback interface. With one
rank nothing is sent: this tests the code and its overhead (gathering weights, reducing gradients), not a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_parts.timing import answer, draft_sizes, part_parser, peak_mib, times_of
from benchmarks.sides.ours import draft_model, make_engine, micro_batches
from benchmarks.sides.problem import Problem, make_problem, slot_targets
from executor.launchers.rank_processes import rank_environment
from ops.lib.sequence_parallel.exchange import flat_mesh, make_mesh
from ops.lib.training import rank_group
from ops.lib.training.dtensors import gathered
from ops.lib.training.optimizer import clip_gradients, make_optimizer, set_rate
from ops.train_dflash.sharding import shard_model

DTYPE = torch.bfloat16
ELEMENTS = {True: 1 << 12, False: 1 << 26}  # moved by a collective, tiny and full


def main() -> None:
    arguments = part_parser(__doc__).parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    repeats = 2 if arguments.tiny else 10
    os.environ.update(rank_environment(0, 1))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    figures: dict[str, Any] = {
        "backend": dist.get_backend(),
        "collectives": collectives(device, arguments.tiny, repeats),
    }
    problem = make_problem(draft_sizes(arguments.tiny), DTYPE, str(device))
    steps = {name: step_figures(problem, device, name == "fsdp2", repeats) for name in ("one process", "fsdp2")}
    answer({**figures, "steps": steps})
    dist.barrier()
    dist.destroy_process_group()


def collectives(device: torch.device, tiny: bool, repeats: int) -> dict[str, Any]:
    """Measure each collective of one rank with itself: seconds, and whether it returns what was sent."""
    sent = torch.randn(ELEMENTS[tiny], generator=torch.Generator(device).manual_seed(0), device=device).to(DTYPE)
    got = torch.empty_like(sent)
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(got.copy_(sent)),
        "all_gather": lambda: dist.all_gather([got], sent),
        "reduce_scatter": lambda: dist.reduce_scatter(got, [sent]),
        "all_to_all": lambda: dist.all_to_all_single(got, sent),
    }
    figures = {}
    for name, run in runs.items():
        got.zero_()
        seconds = times_of(run, device, repeats)
        figures[name] = {"right": bool(torch.equal(sent, got)), "seconds": seconds, "mib": sent.nbytes / 2**20}
    return figures


def step_figures(problem: Problem, device: torch.device, sharded: bool, repeats: int) -> dict[str, Any]:
    """Measure a training step: loss, norm of the gradient, seconds of both passes and of the update, and memory."""
    at_start = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = draft_model(problem)
    if sharded:
        shard_model(model, flat_mesh(make_mesh(1, 1, device)), DTYPE)
    engine = make_engine(model, problem, computing=nullcontext if sharded else None)
    next_batch, weight = micro_batches(problem), float(slot_targets(problem)[1].sum(dtype=torch.float64))
    optimizer = make_optimizer(model, 0.01)
    set_rate(optimizer, 1e-6)
    losses: list[Tensor] = []
    before = (partial(rank_group.release_gradients, model), partial(rank_group.release_parts, model))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        rank_group.hold_gradients(model)
        with engine.computing():
            losses.append(engine.train(next_batch(), 1 / weight, *before).loss)

    def update() -> None:
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()

    step()
    norm = sum(float(gathered(parameter.grad).double().square().sum()) for parameter in model.parameters()) ** 0.5
    figures = {"step": times_of(step, device, repeats), "update": times_of(update, device, repeats)}
    memory = peak_mib(step, device)
    held = (torch.cuda.memory_allocated(device) - at_start) / 2**20 if device.type == "cuda" else None
    return {**figures, "loss": float(losses[0]) / weight, "gradient_norm": norm, "mib": memory, "held_mib": held}


if __name__ == "__main__":
    main()
