"""The weights of a step in a narrower compute dtype: cast once, however often they are used.

Every use of a master weight that casts it reads four bytes and writes two per element, and its backward pass reads two
and writes four. Working copies are separate leaves: a pass gives them gradients in their dtype, which are added to
those of the masters, in the masters' dtype, as soon as they exist. A weight that a pass uses once gets the bits
that casting it at its use would give; used more often, its gradients of one pass would be added in the narrow dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from attrs import frozen
from torch import Tensor, nn


@frozen(eq=False)
class _Place:
    """A parameter's module and name, with its master and its working copy."""

    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter


class WorkingWeights:
    """Copies of a model's parameters in `dtype`, for a model without shared parameters.

    The copies remain the same tensors from step to step, which suits compiled code and allocators.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._places = [
            _Place(module, name, master, _working_copy(master, dtype))
            for module in model.modules()
            for name, master in module.named_parameters(recurse=False)
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with copies of the masters' values on entry, and the masters get the gradients.

        The model's parameters are the copies inside, and the masters outside.
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
    """Adds a copy's gradient to that of its master."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None  # the hook runs once it is set
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
