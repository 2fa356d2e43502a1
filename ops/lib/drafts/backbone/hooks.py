"""What an algorithm adds to the backbone: modules around the attention and the MLP of a layer, and heads beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Drawn(nn.Module, ABC):
    """A module that draws its own initial weights.

    hidden_matrices: its parameters that map hidden states to hidden states, for which Muon's update is made; not tables
    with a row for each token. undecayed: parameters without weight decay.
    """

    hidden_matrices: tuple[str, ...] = ()
    undecayed: tuple[str, ...] = ()

    @abstractmethod
    def draw(self, generator: torch.Generator, std: float) -> None:
        """Set all parameters to initial values. std: of the backbone's matrices. Called without gradients."""


def added_parameters(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that the algorithm adds."""
    added = [name for name, _ in _drawn(model)]
    return frozenset(name for name, _ in model.named_parameters() if any(name.startswith(f"{each}.") for each in added))


def no_hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Added parameters that Muon is not meant for."""
    return added_parameters(model) - {
        f"{name}.{own}" for name, module in _drawn(model) for own in module.hidden_matrices
    }


def undecayed(model: nn.Module) -> frozenset[str]:
    """Added parameters without weight decay."""
    return frozenset(f"{name}.{own}" for name, module in _drawn(model) for own in module.undecayed)


def _drawn(model: nn.Module) -> list[tuple[str, Drawn]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Drawn)]


class Around(Drawn):
    """A module around one sublayer of a layer, before and after it. N blocks, K slots, hidden size M.

    reach: how many earlier slots the input of a slot reads, the same in every slot; `leave` then needs a row for each
    slot, [N, K, ...]. None: any slots, and any data.
    """

    reach: int | None = None

    @abstractmethod
    def enter(self, x_NKM: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input [N, K, M], made from the normed hidden states, and data that `leave` needs."""

    @abstractmethod
    def leave(self, y_NKM: Tensor, kept: Tensor) -> Tensor:
        """The addition to the residual stream, computed from the sublayer's output."""
