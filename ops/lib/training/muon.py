"""Muon: momentum whose matrices are made orthogonal before they are applied, on whole or sharded matrices.

    B <- m B + (1 - m) G;  U = (1 - m) G + m B;  W <- (1 - lr * decay) W - lr * 0.2 * sqrt(max(rows, columns)) * O(U)

O(U) is close to the orthogonal factor of U: five Newton-Schulz steps *in bfloat16*, whatever the dtype of W. The factor
0.2 * sqrt(max) gives the update the root mean square of AdamW's. Same numbers as torch.optim.Muon with
adjust_lr_fn="match_rms_adamw".

A matrix of FSDP2 is cut on dimension 0 over P ranks, and O needs all of it. P matrices at a time, an all-to-all hands
each rank all parts of one matrix in bfloat16, which loses nothing since O rounds to it anyway; the rank makes it
orthogonal and a second all-to-all returns the parts. So every matrix is processed once, 1/P of them by each rank,
bit for bit as on one process given the same gradient. Sent per rank: twice 2 bytes * (P - 1) / P for each element of
its part. Gradients that differ in their last float32 bits may round to other bfloat16 values, so with Muon runs on
other numbers of ranks agree to about 5e-3 of an update, not to float32 rounding.

Sources: K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (the coefficients); the scale, Moonlight,
arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import ParamsT

from dsl.errors import ConfigError
from ops.lib.training.dtensors import local

COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """The optimizer Muon, for parameters of two dimensions, plain or sharded.

    Its state is "momentum_buffer", sharded like the parameter. Raises ConfigError for parameters of other dimensions,
    or sharded in another way than by FSDP2.
    """

    def __init__(self, params: ParamsT, lr: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                _check(parameter)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._nesterov(parameter) for parameter in parameters]
            for parameter, update in zip(parameters, orthogonal_parts(parameters, updates), strict=True):
                rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape))
                local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _nesterov(self, parameter: nn.Parameter) -> Tensor:
        """Update the momentum buffer, and return this rank's part of the Nesterov update."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, buffer = local(parameter.grad), local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(buffer, MOMENTUM)


def orthogonal(update: Tensor) -> Tensor:
    """A matrix like `update` with all singular values near 1 (about 0.7 to 1.2), bfloat16 [rows, columns].

    Newton-Schulz: X <- a X + (b A + c A A) X with A = X X^T, on the wide form, from X = U / |U|.
    """
    a, b, c = COEFFICIENTS
    tall = update.shape[0] > update.shape[1]
    x = update.to(torch.bfloat16)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def orthogonal_parts(parameters: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> list[Tensor]:
    """The orthogonal form of every update; `updates` and the result hold this rank's parts.

    Sharded matrices are handled largest first, so that the P matrices of one exchange cost about the same.
    """
    done = {
        index: orthogonal(update) for index, update in enumerate(updates) if not isinstance(parameters[index], DTensor)
    }
    sharded = [index for index in range(len(updates)) if index not in done]
    sharded.sort(key=lambda index: -parameters[index].numel())
    size = parameters[sharded[0]].device_mesh.size() if sharded else 1
    for start in range(0, len(sharded), size):
        batch = sharded[start : start + size]
        shapes = [parameters[index].shape for index in batch]
        parts = _exchanged(shapes, [updates[index] for index in batch], parameters[batch[0]].device_mesh)
        done.update(zip(batch, parts, strict=True))
    return [done[index] for index in range(len(updates))]


def _exchanged(shapes: Sequence[torch.Size], parts: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Orthogonalise at most P matrices on P ranks: returns this rank's parts of the results.

    Matrix i is gathered on rank i, made orthogonal there, and sharded again.
    """
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    own = [part.numel() for part in parts] + [0] * (size - len(parts))
    theirs = [0] * size
    if rank < len(parts):
        theirs = [rows * shapes[rank][1] for rows in _rows(shapes[rank][0], size)]
    sent = torch.cat([part.to(torch.bfloat16).flatten() for part in parts])
    whole = sent.new_empty(sum(theirs))
    dist.all_to_all_single(whole, sent, theirs, own, group=group)
    if rank < len(parts):
        whole = orthogonal(whole.view(shapes[rank])).flatten()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, whole.contiguous(), own, theirs, group=group)
    return [x.view_as(part) for x, part in zip(received.split(own[: len(parts)]), parts, strict=True)]


def _rows(rows: int, size: int) -> list[int]:
    """The number of rows that each rank holds, as torch.chunk cuts; the last ranks may hold fewer or none."""
    chunk = -(-rows // size)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(size)]


def _check(parameter: nn.Parameter) -> None:
    if parameter.ndim != 2:
        raise ConfigError(f"Muon accepts only matrices, got a parameter of shape {list(parameter.shape)}")
    if isinstance(parameter, DTensor) and tuple(parameter.placements) != (Shard(0),):
        raise ConfigError(
            f"Muon accepts only matrices cut on dimension 0 over a mesh of one dimension, got {parameter.placements}; "
            "flatten the mesh before fully_shard"
        )
