"""The data-parallel ranks of a training: sums over all of them, which are the identity for one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsl.stage import Stage


@contextmanager
def joined(stage: Stage) -> Iterator[None]:
    """Join the process group that torchrun's environment names, and leave it behind a barrier.

    Without the barrier a rank that ends first tears connections down that others still use. After an error there is
    no barrier, since the others may never come to it.
    """
    if stage.world_size == 1:
        yield
        return
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl" if stage.device == "cuda" else "gloo")
    try:
        yield
        dist.barrier()
    finally:
        if mine:
            dist.destroy_process_group()


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all ranks. Autograd does not see it: never for a loss."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on at least one rank, so that all ranks decide alike."""
    return bool(summed(torch.tensor(int(flag), device=device)).item())


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its mean over the ranks; a rank without samples counts as zeros."""
    if not dist.is_initialized():
        return
    owners = list(parameters)
    gradients = [torch.zeros_like(owner) if owner.grad is None else owner.grad for owner in owners]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    summed(flat).div_(dist.get_world_size())
    for owner, part in zip(owners, flat.split([owner.numel() for owner in owners]), strict=True):
        owner.grad = part.view_as(owner)


def wait_for_all() -> None:
    """A barrier; nothing for one process."""
    if dist.is_initialized():
        dist.barrier()
