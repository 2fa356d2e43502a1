"""Sets the layers whose inputs SGLang's model keeps. Loads neither torch nor sglang.

SGLang numbers by the layer whose input is kept: for the feature of layer k that is k + 1. Both setters, that of DFLASH
and that of EAGLE-3, accept feature ids and add 1; called without ids, EAGLE-3's keeps the inputs of
layers 2, n // 2 and n - 3, so its default features are those of layers 1, n // 2 - 1 and n - 4.

Many classes lack the setter of DFLASH (`ops/lib/sglang/model_classes.py` reads which), and the server dies:

Dense Qwen3-VL: the wrapper's `set_dflash_layers_to_capture` calls a method of that name that its decoder lacks,
which is an AttributeError. The decoder captures the inputs of the layers in `layers_to_capture`, and
the wrapper has already incremented the ids, so only storing them is missing.

Those with EAGLE-3's alone (Qwen2, Qwen2.5-VL, GLM-4-MoE, MiniMax-M2, ...): the wrapper has no such method, which is a
ValueError. Its `set_eagle3_layers_to_capture` accepts the same ids and has the required effect.

Gemma 3 is one of the latter, but what it keeps lacks the residual: between two layers a state is a pair of which SGLang
keeps the first part only, the last MLP's output. Here the layers that are captured return the sum.

Some of the latter do not show the worker their embedding (Qwen2-MoE, EXAONE-MoE) or their head (the wrappers of Gemma 3
and Llama 4), which a draft borrows: the server starts and dies at the first draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsl.errors import DataError
from ops.lib.sglang.adapter import adapter
from ops.lib.sglang.model_classes import EAGLE_SETTER, SETTER


def set_layers_to_capture(model: Any, layer_ids: Sequence[int], num_layers: int) -> None:
    """Make SGLang's model keep the input of layer k+1 for each k of `layer_ids`, and of no other layer.

    Calls the setter of DFLASH, for the layers of an EAGLE-3 draft too: DeepSeek's other one adds 1 only to ids that
    begin with 1. Raises DataError for the last layer, whose id SGLang silently drops, for ids out of range, and for a
    model without a setter.
    """
    beyond = [layer_id for layer_id in layer_ids if not 0 <= layer_id < num_layers - 1]
    if beyond:
        raise DataError(f"layers {beyond} cannot be captured from {num_layers} layers: use 0 to {num_layers - 2}")
    adapter().patch_setter(model)
    keep_no_layers(model)
    setter = getattr(model, SETTER, None)
    if setter is None:
        raise DataError(f"SGLang's {type(model).__name__} cannot keep the hidden states of its layers")
    setter(list(layer_ids))


def keep_no_layers(model: Any) -> None:
    """Clear the list of layers whose states SGLang's model keeps; Qwen3.5's setter would only add to it."""
    if not isinstance(getattr(type(model), "capture_aux_hidden_states", None), property):  # LFM2 asks the list
        model.capture_aux_hidden_states = False
    model.model.layers_to_capture = []
    for layer in model.model.layers:  # Qwen3.5, Qwen3-Next and LFM2 read marks on their layers
        if getattr(layer, "_is_layer_to_capture", False):
            layer._is_layer_to_capture = False


def add_missing_setter(model: Any) -> bool:
    """Add the setter method to the class of SGLang's model or of its decoder; False if it has the method.

    A class that gets EAGLE-3's also gets a way to its embedding and head, where it has none. Qwen3.5 inherits from
    Qwen3-VL's wrapper, but its decoder has the method.
    """
    name, wrapper, decoder = type(model).__name__, type(model), getattr(model, "model", None)
    if name == "Qwen3VLForConditionalGeneration" and not hasattr(type(decoder), SETTER):
        setattr(type(decoder), SETTER, _store_layers)
        return True
    if not hasattr(wrapper, SETTER) and hasattr(wrapper, EAGLE_SETTER):
        setattr(wrapper, SETTER, _keep_sums if name in WITHOUT_RESIDUAL else getattr(wrapper, EAGLE_SETTER))
        _show_ends(model)
        return True
    return False


WITHOUT_RESIDUAL = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")


def _show_ends(model: Any) -> None:
    """Give the class of SGLang's model the method and the attribute by which the worker finds embedding and head."""
    wrapper = type(model)
    if not hasattr(wrapper, "get_input_embeddings"):
        wrapper.get_input_embeddings = lambda self: _language_model(self).model.embed_tokens
    if not hasattr(model, "lm_head") and _language_model(model) is not model:
        wrapper.lm_head = property(lambda self: _language_model(self).lm_head)


def _language_model(model: Any) -> Any:
    return getattr(model, "language_model", model)


def _store_layers(decoder: Any, layers: list[int]) -> None:
    decoder.layers_to_capture = list(layers)


def _keep_sums(model: Any, layer_ids: list[int]) -> None:
    """A setter for Gemma 3: the layers of these ids return their state as a sum, which the model then keeps."""
    for hook in getattr(model, "_hooks_of_sums", ()):
        hook.remove()
    decoder = _language_model(model).model
    model._hooks_of_sums = [decoder.layers[layer_id].register_forward_hook(_as_sum) for layer_id in layer_ids]
    getattr(model, EAGLE_SETTER)(layer_ids)


def _as_sum(_layer: Any, _arguments: Any, output: tuple[Any, Any]) -> tuple[Any, None]:
    """The output of a layer, a state and its residual, as their sum without a residual."""
    hidden, residual = output
    return hidden + residual, None
