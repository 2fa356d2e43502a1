"""Weights that take the place of a model's for a while: their moving average, and copies in a narrower dtype.

An exponential moving average is kept in the dtype of the masters, and cut as they are.

Copies in a narrower compute dtype are cast once a step, however often they are used. Every use of a master weight that
casts it reads four bytes and writes two per element, and its backward pass reads two and writes four. Working copies
are separate leaves: a pass gives them gradients in their dtype, which are added to those of the masters, in the
masters' dtype, as soon as they exist. A weight that a pass uses once gets the bits that casting it at its use would
give; used more often, its gradients of one pass would be added in the narrow dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from attrs import frozen
from torch import Tensor, nn

from ops.lib.training.dtensors import local, reshard


class Ema:
    """A moving average of a model's parameters, starting from their current values; create it after `fully_shard`.

    After t updates the next one uses d = min(decay, (1 + t) / (10 + t)) of the average and 1 - d of the weights, so
    that the first steps soon lose influence. weights: name -> tensor. updates: t.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.updates = 0
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }
        self._parameters = dict(model.named_parameters())

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a finished step to the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, average in self.weights.items():
            local(average).lerp_(local(self._parameters[name]), 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Opens a context in which the model holds the average.

        It is for validation and export, not for a step or a checkpoint.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)
        for name, average in self.weights.items():
            weight, average = local(self._parameters[name]), local(average)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


@frozen(eq=False)
class _Place:
    """The place of a parameter, module and name, with its master and its working copy."""

    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter


class WorkingWeights:
    """Working copies of a model's parameters in `dtype`, for a model without shared parameters.

    The copies stay the same tensors from step to step, which suits compiled code and allocators.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._places = [
            _Place(module, name, master, _working_copy(master, dtype))
            for module in model.modules()
            for name, master in module.named_parameters(recurse=False)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Open a context in which the model computes with copies of the masters, taken on entry.

        The masters get the gradients. The model's parameters are the copies inside, and the masters outside.
        """
        with torch.no_grad():
            torch._foreach_copy_([place.copy for place in self._places], [place.master for place in self._places])
        try:
            for place in self._places:
                setattr(place.module, place.name, place.copy)
            yield
        finally:
            for place in self._places:
                setattr(place.module, place.name, place.master)


def _working_copy(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(master, dtype=dtype), requires_grad=master.requires_grad)
    if master.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_hand_over, master))
    return copy


def _hand_over(master: nn.Parameter, copy: Tensor) -> None:
    """Move the gradient of a copy to its master parameter, where it is added."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None  # the hook runs once it is set
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
