"""What torch runs inside a `with`, by operation, of the thread that enters it."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "aten::index", "aten::index_select")


@define
class Call:
    """One call of an operation: its name, its arguments and its result."""

    name: str
    arguments: tuple[Any, ...]
    result: Any


@define(eq=False)
class Recorded(TorchDispatchMode):
    """A mode that records every operation in order."""

    calls: list[Call] = field(factory=list)

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append(Call(function._schema.name, args, result))
        return result

    def of(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]


def memory_of(tensors: Any) -> set[int]:
    """The addresses at which the memory of tensors begins."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def casts_of(recorded: Recorded, weights: list[Tensor]) -> list[Call]:
    """The recorded copies that change the dtype of one of these tensors."""
    places = memory_of(weights)
    return [call for call in recorded.of("aten::_to_copy") if call.arguments[0].untyped_storage().data_ptr() in places]


def copied(recorded: Recorded, width: int) -> list[tuple[int, ...]]:
    """The shapes of all copies of tensors with rows of that width, in order: into a tensor, or into a new one."""
    results = [call.result for call in recorded.of(*COPIES)]
    return [tuple(result.shape) for result in results if torch.is_tensor(result) and result.shape[-1:] == (width,)]
