"""The ranks of a stage: rendezvous, joining, sums over all of them, and when FSDP2 communicates.

For one process everything here is the identity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dsl.errors import StopRequested
from dsl.stage import RENDEZVOUS, Stage
from ops.lib.training.peers import own_peers

WAIT_FOR_OTHERS = timedelta(minutes=30)  # torch's default, for a rank that comes late to the store
T = TypeVar("T")


def meeting_store(rank: int, world_size: int) -> dist.Store:
    """The key-value store through which the stage's ranks meet.

    On one host it is a file that only this user can open, without a network. On several it is torchrun's, named by the
    environment. Any process that can write to it can replace a rank, and ranks unpickle what they receive.
    """
    file = os.environ.get(RENDEZVOUS)
    if not file:
        store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=world_size))
        return store
    store = dist.FileStore(
        file
    )  # without a fixed number of ranks, so that dflow removes the file and none of them does
    store.set_timeout(WAIT_FOR_OTHERS)
    return store


@contextmanager
def joined(stage: Stage) -> Iterator[None]:
    """Open a context in the process group of the stage's ranks; it is left after a barrier.

    Without the barrier, a rank that ends first would close connections that others still use. After an error there is
    no barrier, since other ranks may never reach it; for the same reason nccl's group is not left then. A stop is no
    error: all ranks raise it after the same step.
    """
    if stage.world_size == 1:
        yield
        return
    mine = not dist.is_initialized()
    if mine:
        backend = "nccl" if stage.device == "cuda" else "gloo"
        store = meeting_store(stage.rank, stage.world_size)
        with own_peers():
            dist.init_process_group(backend, store=store, rank=stage.rank, world_size=stage.world_size)
    together = False
    try:
        yield
        together = True
    except StopRequested:
        together = True
        raise
    finally:
        if together:
            dist.barrier()
        if mine and (together or dist.get_backend() != "nccl"):
            dist.destroy_process_group()


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all ranks. Autograd does not see it: never for a loss."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def collected(value: T) -> list[T]:
    """The values of all ranks, in rank order, on every rank; any picklable values. A collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def device_of(stage: Stage) -> torch.device:
    """The device of this rank; a GPU with its number.

    Micro-batches are made in a thread, where torch's current GPU would be the first one.
    """
    cuda = stage.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(stage.device)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on at least one rank, so that all ranks decide alike; a collective."""
    if not dist.is_initialized():
        return flag
    return bool(summed(torch.tensor(int(flag), device=device)).item())


def is_first() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def hold_gradients(model: nn.Module) -> None:
    """Keep the gradients of the following passes on this rank, without communication, and the gathered weights too."""
    _communicate(model, False)


def release_parts(model: nn.Module) -> None:
    """Announce that the next pass is the step's last but one, in which separately sharded parts get gradients.

    Each part reduces its gradients as soon as they are complete. The gathered weights stay.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
        model.set_requires_gradient_sync(False, recurse=False)


def release_gradients(model: nn.Module) -> None:
    """Announce that the next pass is the step's last: its end reduces all gradients and frees the gathered weights."""
    _communicate(model, True)


def _communicate(model: nn.Module, now: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_reshard_after_backward(now)
        model.set_is_last_backward(now)


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The indices that each rank gets, ascending: the most expensive first, to the rank with the least so far.

    A rank may get none.
    """
    loads = [0.0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        rank = loads.index(min(loads))
        dealt[rank].append(place)
        loads[rank] += costs[place]
    return [sorted(places) for places in dealt]
