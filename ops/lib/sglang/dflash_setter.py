"""Patch for the method that some targets lack in SGLang 0.5.21 for DFLASH, or implement wrongly.

Dense Qwen3-VL: the wrapper's `set_dflash_layers_to_capture` calls a method of that name that its decoder lacks,
and the server dies with an AttributeError. The decoder captures the inputs of the layers in `layers_to_capture`, and
the wrapper has already incremented the ids, so only storing them is missing.

Qwen2.5-VL: the wrapper has no such method, and the server dies with a ValueError. Its
`set_eagle3_layers_to_capture` accepts the same ids and has the required effect.

Qwen3.5 without a vision tower: its class defines the method twice, and the second, which wins, does not increment the
ids. Nothing fails; every feature is that of the previous layer, and the draft's proposals are rejected.

This module loads neither torch nor sglang.
"""

from __future__ import annotations

from typing import Any

SETTER = "set_dflash_layers_to_capture"
EAGLE_SETTER = "set_eagle3_layers_to_capture"


def patch_setter(model: Any) -> bool:
    """Adds the missing method to the class of SGLang's model or of its decoder; False if it is already correct.

    Only the classes named here are changed. Qwen3.5 inherits from Qwen3-VL's wrapper, but its decoder has the method.
    """
    name, wrapper, decoder = type(model).__name__, type(model), type(model.model)
    if name == "Qwen3VLForConditionalGeneration" and not hasattr(decoder, SETTER):
        setattr(decoder, SETTER, _store_layers)
        return True
    if wrapper.__module__.endswith(".qwen3_5_text") and getattr(wrapper, SETTER) is not _capture_behind:
        setattr(wrapper, SETTER, _capture_behind)
        return True
    if name == "Qwen2_5_VLForConditionalGeneration" and not hasattr(wrapper, SETTER):
        setattr(wrapper, SETTER, getattr(wrapper, EAGLE_SETTER))
        return True
    return False


def _capture_behind(wrapper: Any, layers: list[int]) -> None:
    """The output of a layer is the input of the next one."""
    wrapper.capture_aux_hidden_states = True
    wrapper.model.set_dflash_layers_to_capture([layer + 1 for layer in layers])


def _store_layers(decoder: Any, layers: list[int]) -> None:
    decoder.layers_to_capture = list(layers)
