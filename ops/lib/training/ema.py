"""An exponential moving average of the weights, kept in the dtype of the masters and cut as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ops.lib.training.dtensors import local, reshard


class Ema:
    """The average of a model's parameters, starting from their current values; created after `fully_shard`.

    After t updates the next one uses d = min(decay, (1 + t) / (10 + t)) of the average and 1 - d of the weights, so
    that the first steps soon lose their weight. weights: name -> tensor; updates: t.
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
        """Adds the weights of a finished step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, average in self.weights.items():
            local(average).lerp_(local(self._parameters[name]), 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model holds the average: for validation and export, not for a step or a checkpoint."""
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
