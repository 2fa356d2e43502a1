"""Which target layers are captured."""

from __future__ import annotations

from collections.abc import Sequence

from dsl.errors import ConfigError
from ops.capture_targets.op import CaptureTargets


def layers_of(config: CaptureTargets, num_target_layers: int) -> tuple[int, ...]:
    """The layers that the config lists, or those of its recipe. Raises ConfigError where the target lacks one."""
    if config.target_layer_ids is None:
        if config.recipe == "eagle3":
            return eagle3_layers(num_target_layers)
        return spread_layers(num_target_layers, config.layer_count)
    check_layers(config.target_layer_ids, num_target_layers)
    return config.target_layer_ids


def spread_layers(num_target_layers: int, num_layers: int, field: str = "num_layers") -> tuple[int, ...]:
    """`num_layers` ids from the 2nd to the 3rd-last of `num_target_layers` layers, evenly spread.

    round(1 + i * (n - 4) / (L - 1)) for i = 0 .. L - 1, and n // 2 for L = 1.
    Source: the DFlash reference implementation. Raises ConfigError for the config's `field` if two ids would be equal.
    """
    n, count = num_target_layers, num_layers
    if count == 1:
        ids: tuple[int, ...] = (n // 2,)
    else:
        ids = tuple(round(1 + i * (n - 4) / (count - 1)) for i in range(count))
    if n < 3:
        instead = "set target_layer_ids = [0] instead" if n == 2 else "use a target of 2 layers or more"
        raise ConfigError(
            f"{field} = {count}: a target of {n} layer{'s' * (n > 1)} has none between its 2nd and 3rd-last; {instead}"
        )
    if len(set(ids)) < count or min(ids) < 0:
        shown = f" (they would be {list(ids)})" if count <= n else ""
        raise ConfigError(
            f"{field} = {count}: a target of {n} layers has no {count} distinct layers between its 2nd and "
            f"3rd-last{shown}; set it to at most {max(1, n - 3)}, or list the layers in target_layer_ids"
        )
    check_layers(ids, n)
    return ids


def eagle3_layers(num_target_layers: int) -> tuple[int, ...]:
    """The three layers whose features an EAGLE-3 draft uses: near the start, in the middle, and near the end.

    1, n // 2 - 1 and n - 4 for n layers: the inputs of layers 2, n // 2 and n - 3, which serving engines use for such
    a draft by default. Source: EAGLE-3, arXiv 2503.01840, uses low, middle and high features; SGLang 0.5.21 has the
    numbers (set_eagle3_layers_to_capture), and SpecForge trains with the same.
    Raises ConfigError for a target without three such layers.
    """
    n = num_target_layers
    ids = (1, n // 2 - 1, n - 4)
    if not 1 < ids[1] < ids[2]:
        raise ConfigError(
            f'recipe = "eagle3": a target of {n} layers has no three distinct layers 1, n / 2 - 1 and n - 4 (they '
            f"would be {list(ids)}); list the layers in target_layer_ids"
        )
    return ids


def check_layers(layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Check the ids of layers to capture. Raises ConfigError for one out of range, and for the last layer's.

    The feature of layer k is the input of layer k + 1; serving engines drop the last layer's id silently.
    """
    for layer_id in layer_ids:
        if layer_id == num_target_layers - 1:
            raise ConfigError(
                f"target_layer_ids: {layer_id} is the last of {num_target_layers} layers, which cannot be captured; "
                f"use ids from 0 to {num_target_layers - 2}"
            )
        if not 0 <= layer_id < num_target_layers:
            raise ConfigError(
                f"target_layer_ids: {layer_id} is out of range; this target has layers 0 to {num_target_layers - 1}, "
                "the last of which cannot be captured"
            )
