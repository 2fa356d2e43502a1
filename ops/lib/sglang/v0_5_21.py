"""SGLang 0.5.21 behind the interface of adapter.py."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.mm_utils import MultiModalityDataPaddingPatternMultimodalTokens
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
from sglang.srt.managers.tokenizer_manager import determine_tensor_transport_mode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from ops.lib.sglang.layers import add_missing_setter
from ops.lib.sglang.model_classes import SETTER


class NoPrefixes(SimpleNamespace):
    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def is_chunk_cache(self) -> bool:
        return False

    def is_tree_cache(self) -> bool:
        return True

    def evict(self, _params: Any) -> None:
        """Do nothing: there is nothing to evict."""


def tensor_transport() -> Any:
    return determine_tensor_transport_mode()


def pad_image_tokens(input_ids: array[int], images: MultimodalInputs) -> array[int]:
    padded: array[int] = MultiModalityDataPaddingPatternMultimodalTokens().pad_input_tokens(input_ids, images)
    return padded


def extend_to_end(request: Req) -> None:
    request.set_extend_range(len(request.prefix_indices), len(request.origin_input_ids))


def bind_slots(_forward_batch: ForwardBatch, _runner: ModelRunner) -> None:
    """Do nothing: in this version attention uses the batch's slots as they are."""


def patch_setter(model: Any) -> bool:
    """Correct the setter of Qwen3.5 without a vision tower; False if nothing is wrong.

    The class defines the method twice, and the second, which wins, does not increment the ids. Then every feature is
    that of the previous layer, and the draft's proposals are silently rejected.
    """
    wrapper = type(model)
    if wrapper.__module__.endswith(".qwen3_5_text") and getattr(wrapper, SETTER) is not _capture_behind:
        setattr(wrapper, SETTER, _capture_behind)
        return True
    return add_missing_setter(model)


def _capture_behind(wrapper: Any, layers: list[int]) -> None:
    """Set the layers so that each one's output is kept, as the input of the next layer."""
    wrapper.capture_aux_hidden_states = True
    wrapper.model.set_dflash_layers_to_capture([layer + 1 for layer in layers])
