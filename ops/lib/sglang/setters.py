"""Missing setters of the layers whose inputs SGLang's models keep, for DFLASH. Loads neither torch nor sglang.

Two models lack it in every supported version:

Dense Qwen3-VL: the wrapper's `set_dflash_layers_to_capture` calls a method of that name that its decoder lacks,
and the server dies with an AttributeError. The decoder captures the inputs of the layers in `layers_to_capture`, and
the wrapper has already incremented the ids, so only storing them is missing.

Qwen2.5-VL: the wrapper has no such method, and the server dies with a ValueError. Its
`set_eagle3_layers_to_capture` accepts the same ids and has the required effect.
"""

from __future__ import annotations

from typing import Any

SETTER = "set_dflash_layers_to_capture"
EAGLE_SETTER = "set_eagle3_layers_to_capture"


def add_missing_setter(model: Any) -> bool:
    """Adds the method to the class of SGLang's model or of its decoder; False if it has it.

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
