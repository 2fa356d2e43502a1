"""What a capture needs of its target and tokens, as promised and as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsl.errors import ConfigError
from ops.capture_targets.layers import layers_of
from ops.capture_targets.op import CaptureTargets
from ops.lib.forecasts import TargetStated, TokensForecast, by_field, tokens_misfit


def conflicts(config: CaptureTargets, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: layers that the target lacks, tokens of another vocabulary, splits without samples."""
    return by_field(_mistakes(config, forecast["target"], forecast["tokens"]))


def _mistakes(
    config: CaptureTargets, target: TargetStated | None, tokens: TokensForecast | None
) -> Iterator[tuple[str, str]]:
    if target is not None:
        try:
            layers_of(config, target.info["num_layers"])
        except ConfigError as error:
            yield _layer_field(config), str(error)
    if misfit := tokens_misfit(tokens, target):
        yield "tokens", misfit
    if tokens is not None and tokens.empty.issuperset(config.splits):
        yield "splits", f"no samples in the splits {', '.join(config.splits)}: nothing to capture"


def _layer_field(config: CaptureTargets) -> str:
    if config.target_layer_ids is not None:
        return "target_layer_ids"
    return "recipe" if config.recipe == "eagle3" else "num_layers"
