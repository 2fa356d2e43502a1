"""Sets the layers whose inputs SGLang's model keeps. Loads neither torch nor sglang.

SGLang numbers by the layer whose input is kept: for the feature of layer k that is k + 1. Both setters, that of DFLASH
and that of EAGLE-3, accept feature ids and add 1; called without ids, EAGLE-3's keeps the inputs of
layers 2, n // 2 and n - 3, so its default features are those of layers 1, n // 2 - 1 and n - 4.

Two models lack the setter of DFLASH in every supported version:

Dense Qwen3-VL: the wrapper's `set_dflash_layers_to_capture` calls a method of that name that its decoder lacks,
and the server dies with an AttributeError. The decoder captures the inputs of the layers in `layers_to_capture`, and
the wrapper has already incremented the ids, so only storing them is missing.

Qwen2.5-VL: the wrapper has no such method, and the server dies with a ValueError. Its
`set_eagle3_layers_to_capture` accepts the same ids and has the required effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dsl.errors import DataError
from ops.lib.sglang.adapter import adapter

Recipe = Literal["dflash", "eagle3"]


def set_layers_to_capture(model: Any, layer_ids: Sequence[int], num_layers: int, recipe: Recipe = "dflash") -> None:
    """Make SGLang's model keep the input of layer k+1 for each k of `layer_ids`, and of no other layer.

    Calls the recipe's setter, or the other one if the model's class lacks it or it has no effect; both keep the same
    states. Raises DataError for the last layer, whose id SGLang silently drops, for ids out of range, and for a model
    with neither setter.
    """
    beyond = [layer_id for layer_id in layer_ids if not 0 <= layer_id < num_layers - 1]
    if beyond:
        raise DataError(f"layers {beyond} cannot be captured from {num_layers} layers: use 0 to {num_layers - 2}")
    adapter().patch_setter(model)
    keep_no_layers(model)
    setters = [getattr(model, SETTER, None), getattr(model, EAGLE_SETTER, None)]
    if type(model).__name__.startswith("Qwen3_5"):
        setters[1] = None  # inherited from Qwen3-VL: it fills a list, but Qwen3.5's decoder reads marks on the layers
    setter = next(filter(None, setters if recipe == "dflash" else reversed(setters)), None)
    if setter is None:
        raise DataError(f"SGLang's {type(model).__name__} cannot keep the hidden states of its layers")
    setter(list(layer_ids))


def keep_no_layers(model: Any) -> None:
    """Clear the list of layers whose states SGLang's model keeps; Qwen3.5's setter would only add to it."""
    model.capture_aux_hidden_states = False
    model.model.layers_to_capture = []
    for layer in model.model.layers:  # Qwen3.5 reads marks on its layers
        if getattr(layer, "_is_layer_to_capture", False):
            layer._is_layer_to_capture = False


SETTER = "set_dflash_layers_to_capture"
EAGLE_SETTER = "set_eagle3_layers_to_capture"


def add_missing_setter(model: Any) -> bool:
    """Add the setter method to the class of SGLang's model or of its decoder; False if it has the method.

    Only the classes named here are changed. Qwen3.5 inherits from Qwen3-VL's wrapper, but its decoder has the method.
    """
    name, wrapper, decoder = type(model).__name__, type(model), type(model.model)
    if name == "Qwen3VLForConditionalGeneration" and not hasattr(decoder, SETTER):
        setattr(decoder, SETTER, _store_layers)
        return True
    if name == "Qwen2_5_VLForConditionalGeneration" and not hasattr(wrapper, SETTER):
        setattr(wrapper, SETTER, getattr(wrapper, EAGLE_SETTER))
        return True
    return False


def _store_layers(decoder: Any, layers: list[int]) -> None:
    decoder.layers_to_capture = list(layers)
