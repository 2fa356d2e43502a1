"""What a capture needs of its target and tokens, as promised and as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsl.errors import ConfigError
from ops.capture_targets.layers import layers_of
from ops.capture_targets.op import CaptureTargets
from ops.lib.forecasts import TargetStated, TokensForecast, by_field, length_misfit, tokens_misfit
from ops.lib.target.quantised import dequantising_note, method_of

SERVED_DTYPE = (
    "SGLang computes with {method} weights in bfloat16 or float16, and not in float32: set dtype to that of the server"
)


def conflicts(config: CaptureTargets, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: layers that the target lacks, quantised weights that the backend does not run, tokens of
    another vocabulary or longer than the target's positions, splits without samples.
    """
    return by_field(_mistakes(config, forecast["target"], forecast["tokens"]))


def _mistakes(
    config: CaptureTargets, target: TargetStated | None, tokens: TokensForecast | None
) -> Iterator[tuple[str, str]]:
    if target is not None:
        try:
            layers_of(config, target.info["num_layers"])
        except ConfigError as error:
            yield _layer_field(config), str(error)
        if config.backend == "huggingface" and (mistake := target.running_mistake()):
            yield "backend", mistake
        if config.backend == "sglang" and config.dtype == "float32" and method_of(target.config):
            yield "dtype", SERVED_DTYPE.format(method=method_of(target.config))
    if misfit := tokens_misfit(tokens, target):
        yield "tokens", misfit
    if misfit := length_misfit(tokens, target, config.splits):
        yield "tokens", misfit
    if tokens is not None and tokens.empty.issuperset(config.splits):
        yield "splits", f"no samples in the splits {', '.join(config.splits)}: nothing to capture"


def _layer_field(config: CaptureTargets) -> str:
    if config.target_layer_ids is not None:
        return "target_layer_ids"
    return "recipe" if config.recipe == "eagle3" else "num_layers"


def backend_note(config: CaptureTargets, target: Mapping[str, Any]) -> str | None:
    """A warning where the states are not those of a server; None where they are. target: content of its config.json."""
    note = dequantising_note(target, config.dtype) if config.backend == "huggingface" else None
    return note and f'{note}; backend = "sglang" captures those of the server'
