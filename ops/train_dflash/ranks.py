"""The ranks of a training: joining, sums over all of them, and the draft sharded over them by FSDP2.

For one process everything here is the identity.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from dsl.errors import StopRequested
from dsl.stage import Stage
from ops.dflash.model import DraftModel


@contextmanager
def joined(stage: Stage) -> Iterator[None]:
    """Join the process group that torchrun's environment names, and leave it behind a barrier.

    Without the barrier a rank that ends first tears connections down that others still use. After an error there is
    no barrier, since the others may never come to it, and no leaving over nccl, which would wait for them too. A stop
    is no error: all ranks raise it after the same step.
    """
    if stage.world_size == 1:
        yield
        return
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl" if stage.device == "cuda" else "gloo")
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


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on at least one rank, so that all ranks decide alike."""
    return bool(summed(torch.tensor(int(flag), device=device)).item())


def is_first() -> bool:
    """Whether this is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def shard_model(model: DraftModel, flat: DeviceMesh) -> None:
    """Shard the draft over all ranks, as one unit, with FSDP2; gradients are averaged over all ranks.

    Weights are gathered and gradients reduced in the dtype of the master weights; layers cast when they compute.
    The draft is gathered once per step and its gradients reduced once, however many passes a step takes: micro-batches
    and chunks of anchors differ in number between ranks, and so must not communicate.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(model, mesh=flat, reshard_after_forward=False, mp_policy=policy)
    # context_kv returns transposed views; nothing writes into them, which is what FSDP2 warns of on every rank.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for method in ("context_kv", "forward_blocks"):
        register_fsdp_forward_method(model, method)


def hold_gradients(model: DraftModel) -> None:
    """Gradients of the passes that follow are kept on this rank, and its gathered weights too."""
    _communicate(model, False)


def release_gradients(model: DraftModel) -> None:
    """The pass that follows is the step's last: its end reduces all gradients and drops the gathered weights."""
    _communicate(model, True)


def _communicate(model: DraftModel, now: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_reshard_after_backward(now)
        model.set_is_last_backward(now)
