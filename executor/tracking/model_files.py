"""What MLflow keeps of a logged model beside its tags: the file that describes it, its small files, and references."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from ops.lib.logged_model import LoggedModel, Tensor

NAME_LENGTH = 250


@frozen
class ModelFiles:
    """maker: the MLflow run that made the model. small: files by their names; large: what is said of the others."""

    maker: str
    small: Mapping[str, Path]
    large: Mapping[str, Any]


def model_name(name: str) -> str:
    """Without the characters that the name of a model cannot have."""
    return re.sub(r"[/:.%\"']", "_", name)[:NAME_LENGTH]


def mlmodel(model_id: str, model: LoggedModel) -> dict[str, Any]:
    """The file by which MLflow knows a model: its signature, and that its weights are safetensors.

    JSON of it is YAML, as MLflow reads it. Source: https://mlflow.org/docs/latest/ml/model, tensor-based signatures.
    """
    signature = {"inputs": _columns(model.inputs), "outputs": _columns(model.outputs), "params": None}
    return {"model_id": model_id, "flavors": {"safetensors": {"data": "."}}, "signature": signature}


def _columns(tensors: Sequence[Tensor]) -> str:
    shown = [
        {"name": each.name, "type": "tensor", "tensor-spec": {"dtype": each.dtype, "shape": list(each.shape)}}
        for each in tensors
    ]
    return json.dumps(shown)
