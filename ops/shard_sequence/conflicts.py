"""What a plan of batches needs of its features or tokens, as promised and as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.lib.forecasts import FeaturesForecast, TokensForecast
from ops.shard_sequence.op import SPLIT, ShardSequence


def conflicts(_config: ShardSequence, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: a split without a sample to train on."""
    for edge in ("features", "tokens"):
        source: FeaturesForecast | TokensForecast | None = forecast.get(edge)
        if source is not None and SPLIT in source.empty:
            return {edge: f"the split {SPLIT} has no samples; there is nothing to train on"}
    return {}
