"""Whether weights fit a draft's config."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ops.lib.drafts.dflash.config import DraftConfig
from ops.lib.drafts.dflash.model import DraftModel

SHOWN = 3  # tensors that are named


def misfits(config: DraftConfig, weights: Mapping[str, Tensor]) -> list[str]:
    """What prevents a model of this config from using these weights, one text for each kind."""
    with torch.device("meta"):
        expected = DraftModel(config).state_dict()
    both = sorted(expected.keys() & weights.keys())
    kinds = {
        "missing": sorted(expected.keys() - weights.keys()),
        "left over": sorted(weights.keys() - expected.keys()),
        "of another shape": [name for name in both if expected[name].shape != weights[name].shape],
        "not of finite numbers": [name for name in both if not weights[name].isfinite().all()],
    }
    return [f"tensors {kind}: {_named(names)}" for kind, names in kinds.items() if names]


def _named(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
