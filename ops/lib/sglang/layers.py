"""Sets the layers whose inputs SGLang's model keeps, in the way of each family's class.

SGLang numbers by the layer whose input is kept: for the feature of layer k that is k + 1. Both setters, that of DFLASH
and that of EAGLE-3, accept feature ids and add 1; called without ids, EAGLE-3's keeps the inputs of
layers 2, n // 2 and n - 3, so its default features are those of layers 1, n // 2 - 1 and n - 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dsl.errors import DataError
from ops.lib.sglang.dflash_setter import patch_setter

Recipe = Literal["dflash", "eagle3"]


def set_layers_to_capture(model: Any, layer_ids: Sequence[int], num_layers: int, recipe: Recipe = "dflash") -> None:
    """Makes SGLang's model keep the input of layer k+1 for each k of `layer_ids`, and of no other layer.

    Calls the setter of the recipe, or if the model's class lacks it (Qwen2.5-VL has none for DFLASH) or has a
    broken one, the other; both keep the same states. Raises DataError for the last layer, whose id SGLang silently
    drops, for ids out of range, and for a model that has neither.
    """
    beyond = [layer_id for layer_id in layer_ids if not 0 <= layer_id < num_layers - 1]
    if beyond:
        raise DataError(f"layers {beyond} cannot be captured from {num_layers} layers: use 0 to {num_layers - 2}")
    patch_setter(model)
    keep_no_layers(model)
    setters = {
        "dflash": getattr(model, "set_dflash_layers_to_capture", None) if dflash_setter_works(model) else None,
        "eagle3": getattr(model, "set_eagle3_layers_to_capture", None) if eagle3_setter_works(model) else None,
    }
    other: Recipe = "eagle3" if recipe == "dflash" else "dflash"
    setter = setters[recipe] or setters[other]
    if setter is None:
        raise DataError(f"SGLang's {type(model).__name__} cannot keep the hidden states of its layers")
    setter(list(layer_ids))


def keep_no_layers(model: Any) -> None:
    """Clears the layers to keep. Qwen3.5's setter would otherwise add to those of an earlier call."""
    model.capture_aux_hidden_states = False
    model.model.layers_to_capture = []
    for layer in model.model.layers:  # Qwen3.5 reads marks on its layers
        if getattr(layer, "_is_layer_to_capture", False):
            layer._is_layer_to_capture = False


def dflash_setter_works(model: Any) -> bool:
    """Whether the setter, if the model has one, reaches its decoder.

    Dense Qwen3-VL has a wrapper that calls a method which only the mixture-of-experts decoder has.
    """
    if type(model).__name__ == "Qwen3VLForConditionalGeneration":
        return hasattr(model.model, "set_dflash_layers_to_capture")
    return True


def eagle3_setter_works(model: Any) -> bool:
    """Whether the setter affects the decoder.

    Qwen3.5 inherits Qwen3-VL's, which fills a list, but its decoder reads marks on the layers.
    """
    return not type(model).__name__.startswith("Qwen3_5")
