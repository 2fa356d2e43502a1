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
    """This rank's part, without gradient and sharing memory with the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradient. Every rank of the mesh must call it, in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of a whole tensor, the same on every rank, cut as `like` is and on its device; nothing is communicated."""
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Drops the whole parameters that FSDP2 still holds after a forward pass without backward; not for a plain model.

    Until then `named_parameters` returns the whole ones, not the parts, and a forward pass would use them although
    the parts have changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def load_whole(parameter: Tensor, whole: Tensor) -> None:
    """Overwrite a parameter by a whole tensor of its shape, the same on every rank; the dtype stays the parameter's."""
    parameter.copy_(cut_like(whole.to(parameter.dtype), parameter))
