"""Plain tensors and FSDP2's DTensors: a rank's own part, the whole tensor, and a whole tensor cut again.

`fully_shard` cuts every parameter on dimension 0 over a mesh of one dimension; its gradient and the optimizer's moments
are cut likewise. A plain tensor is its own part and its own whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, detached, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradient; a collective of the mesh's ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of a whole tensor, sharded like `like` and on its device, without communication.

    whole: the same on every rank.
    """
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Free the unsharded parameters that FSDP2 keeps after a forward pass without backward. Does nothing to a plain
    model.

    Until then `named_parameters` returns the unsharded ones, and a forward pass would use them even if the shards
    changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def load_whole(parameter: Tensor, whole: Tensor) -> None:
    """Overwrite a parameter with a whole tensor of its shape, the same on every rank; the parameter keeps its dtype."""
    parameter.copy_(cut_like(whole.to(parameter.dtype), parameter))
