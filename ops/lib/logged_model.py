"""An artifact that is a model, as MLflow shows it. An op whose artifact is one names a function that loads no torch:

@op(..., model="module:function")   (folder of the artifact) -> LoggedModel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from dsl.named_function import named_function
from dsl.op import OpSpec


@frozen
class Tensor:
    """An input or an output of a model. dtype as numpy calls it; shape: -1 for a dimension of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@frozen(kw_only=True)
class LoggedModel:
    """kind: what models of this kind are called, to find them by. params: what it was made with."""

    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: Mapping[str, str] = field(factory=dict)
    tags: Mapping[str, str] = field(factory=dict)


def logged_model(op: OpSpec, folder: Path) -> LoggedModel | None:
    """What MLflow shows of an artifact of the op; None where it is no model."""
    if op.model is None:
        return None
    function: Callable[[Path], LoggedModel] = named_function(op.model)
    return function(folder)
