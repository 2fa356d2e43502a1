"""A target's features in float64 throughout: how far a right result in float32 may lie from another right one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ops.lib.data.token_shards import TokenSample
from ops.lib.target.model import Target


class InDouble(TorchFunctionMode):
    """Where a model asks for float32 for accuracy's sake, as its norms and its recurrence do, it gets float64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        doubled = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*doubled, **named)


def exact_features(checkpoint: Path, samples: Sequence[TokenSample], layer_ids: Sequence[int]) -> list[torch.Tensor]:
    """The features [S, F] of each sample by Hugging Face's model with every number in float64."""
    target = Target.from_directory(checkpoint, {}, dtype=torch.float64)
    target.model.set_experts_implementation("eager")  # the grouped product of experts knows no float64
    features = []
    for sample in samples:
        with torch.inference_mode(), InDouble(), target.capture_inputs(layer_ids) as captured:
            target.forward(target.inputs([sample]))
        features.append(captured.features()[0])
    assert {torch.float64} == {one.dtype for one in features}
    return features
