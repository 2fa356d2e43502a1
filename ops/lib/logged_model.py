"""An artifact that is a model, as MLflow shows it. An op whose artifact is one has a hook (dsl/op_class.py):

logged_model(folder of the artifact) -> LoggedModel
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen


@frozen
class Tensor:
    """An input or output of a model, for MLflow. dtype: numpy's name. shape: -1 for a dimension of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@frozen(kw_only=True)
class LoggedModel:
    """A model in an artifact, as MLflow shows it.

    kind: the name by which models of this kind are found. params: settings of its training.
    """

    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: Mapping[str, str] = field(factory=dict)
    tags: Mapping[str, str] = field(factory=dict)
