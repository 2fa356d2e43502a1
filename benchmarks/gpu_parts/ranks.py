"""One rank of a process group: collectives in bfloat16, and a training step sharded by FSDP2 beside one that is not.

nccl on a GPU, gloo on a CPU; the store is in this process, and the backend keeps to the loopback interface. With one
rank nothing travels: this shows that the path runs and what it costs by itself (gathering weights, reducing gradients),
not how fast a network is.
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
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Problem, make_problem, slot_targets
from executor.launchers.ranks import rank_environment
from ops.lib.drafts.attention.blocks import choose_attention
from ops.lib.drafts.dflash.model import DraftModel
from ops.lib.drafts.dflash.step import Engine, MicroBatch
from ops.lib.drafts.losses.loss import Loss
from ops.lib.sequence_parallel.exchange import Alone
from ops.lib.sequence_parallel.mesh import flat_mesh, make_mesh
from ops.lib.training import ranks
from ops.lib.training.dtensors import gathered
from ops.lib.training.optimizer import clip_gradients, make_optimizer, set_rate
from ops.train_dflash.batches import Drawn, Place, prepare
from ops.train_dflash.engine import weights_to_compute_with
from ops.train_dflash.sharding import shard_model

DTYPE = torch.bfloat16
ELEMENTS = {True: 1 << 12, False: 1 << 26}  # of what a collective moves, tiny and full


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
    """Seconds of each exchange of one rank with itself, and whether its outcome is what was sent."""
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
    """Loss, norm of the gradient, seconds of forward and backward and of the update, and memory."""
    at_start = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = DraftModel(draft_config(problem.sizes)).to(device, torch.float32)
    model.load_state_dict(problem.weights)
    if device.type == "cuda":
        model.compile_layers()
    if sharded:
        shard_model(model, flat_mesh(make_mesh(1, 1, device)), DTYPE)
    engine = Engine(
        model=model,
        embed_VM=problem.embed_VM,
        head_VM=problem.head_VM,
        loss=Loss(kind="dflash"),
        attend=choose_attention(device, model.config, DTYPE)[1],
        exchange=Alone(),
        computing=nullcontext if sharded else weights_to_compute_with(model, DTYPE),
    )
    batch, weight = micro_batch(problem, device), float(slot_targets(problem)[1].sum(dtype=torch.float64))
    optimizer = make_optimizer(model, 0.01)
    set_rate(optimizer, 1e-6)
    losses: list[Tensor] = []
    before = (partial(ranks.release_gradients, model), partial(ranks.release_parts, model))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        ranks.hold_gradients(model)
        with engine.computing():
            losses.append(engine.train(batch, 1 / weight, *before).loss)

    def update() -> None:
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()

    step()
    norm = sum(float(gathered(parameter.grad).double().square().sum()) for parameter in model.parameters()) ** 0.5
    figures = {"step": times_of(step, device, repeats), "update": times_of(update, device, repeats)}
    memory = peak_mib(step, device)
    held = (torch.cuda.memory_allocated(device) - at_start) / 2**20 if device.type == "cuda" else None
    return {**figures, "loss": float(losses[0]) / weight, "gradient_norm": norm, "mib": memory, "held_mib": held}


def micro_batch(problem: Problem, device: torch.device) -> MicroBatch:
    """The problem's one sequence as training prepares it."""
    ids_S, anchors_A = problem.ids_S.cpu(), problem.anchors_A.cpu()
    labels_AK, weights_AK = (tensor.cpu() for tensor in slot_targets(problem))
    drawn = Drawn(
        index=0,
        length=len(ids_S),
        anchors_A=anchors_A,
        anchor_ids_A=ids_S[anchors_A],
        labels_AK=labels_AK,
        weights_AK=weights_AK,
    )
    place = Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=device, dtype=DTYPE)
    return prepare(_Features(problem.features_SF.cpu()), [drawn], place)


class _Features:
    """The problem's features as `prepare` reads them."""

    def __init__(self, features_SF: Tensor) -> None:
        self.features_SF = features_SF
        self.width = features_SF.shape[1]

    def features(self, _index: int, first: int, last: int) -> Tensor:
        return self.features_SF[first:last]

    def final_hidden(self, _index: int, _first: int, _last: int) -> Tensor:
        raise NotImplementedError("the problem has no teacher")


if __name__ == "__main__":
    main()
