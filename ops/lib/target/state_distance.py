"""How far the states that a draft is fed are from those that the target computes, and whose they are instead.

`dflow diagnose` asks it of stored features, the gate of what SGLang gives its draft.

S tokens, M hidden size
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def state_distances(states_SM: Tensor, expected_SM: Tensor) -> Tensor:
    """Distances [S] of the states from the expected ones, relative to the norm of these, float32."""
    expected_SM = expected_SM.float()
    size_S = expected_SM.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (states_SM.float() - expected_SM).norm(dim=-1) / size_S


def other_layer(distances: Mapping[int, float], most: float) -> int | None:
    """The layer whose states are closest, if their distance is at most `most`; else None."""
    closest = min(distances, key=lambda k: distances[k], default=None)
    return closest if closest is not None and distances[closest] <= most else None
