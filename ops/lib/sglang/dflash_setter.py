"""The one method that some targets lack in SGLang 0.5.21 for DFLASH, or have wrong, and how a model is given it.

Dense Qwen3-VL: the wrapper's `set_dflash_layers_to_capture` calls a method of that name on its decoder, which has none,
and the server dies with an AttributeError. The decoder captures the inputs of the layers in `layers_to_capture`, and
the wrapper has counted the ids up by one already, so to store them is all that is missing.

Qwen2.5-VL: the wrapper has no such method at all, and the server dies with a ValueError. Its
`set_eagle3_layers_to_capture` takes the same ids and does what the method should.

Qwen3.5 without a vision tower: its class defines the method twice, and the second, which wins, does not count the ids
up by one. Nothing fails; every feature is that of the layer before, and the draft's proposals are refused.

This module loads neither torch nor sglang.
"""

from __future__ import annotations

from typing import Any

SETTER = "set_dflash_layers_to_capture"
EAGLE_SETTER = "set_eagle3_layers_to_capture"


def mend_setter(model: Any) -> bool:
    """Give the class of SGLang's model, or of its decoder, the method that it lacks; False where it has it right.

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
