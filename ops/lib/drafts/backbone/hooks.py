"""What an algorithm adds to the backbone: modules around the attention and the MLP of a layer, and heads beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Drawn(nn.Module, ABC):
    """A module that draws its own start values."""

    @abstractmethod
    def draw(self, generator: torch.Generator, std: float) -> None:
        """Set all parameters; std: of the backbone's matrices. Called without gradients."""


def added_parameters(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that the algorithm adds: tables, kernels and heads, but no hidden matrices."""
    added = {name for name, module in model.named_modules() if isinstance(module, Drawn)}
    return frozenset(name for name, _ in model.named_parameters() if any(name.startswith(f"{each}.") for each in added))


class Around(Drawn):
    """Goes around one sublayer: N blocks, K slots of a block, M hidden size."""

    @abstractmethod
    def enter(self, x_NKM: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input [N, K, M] from the normed one, and what `leave` needs of it."""

    @abstractmethod
    def leave(self, y_NKM: Tensor, kept: Tensor) -> Tensor:
        """What is added to the residual stream, from the sublayer's output."""
