"""SGLang 0.5.23 behind the interface of adapter.py."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.mm_utils import pad_mm_tokens
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.multimodal.transport import determine_tensor_transport_mode

from ops.lib.sglang.layers import add_missing_setter


class NoPrefixes(SimpleNamespace):
    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, _params: Any) -> None:
        """Do nothing: there is nothing to evict."""

    def maybe_hand_to_session(self, _request: Req) -> None:
        """Do nothing: there is no session."""


def tensor_transport() -> Any:
    return determine_tensor_transport_mode()


def pad_image_tokens(input_ids: array[int], images: MultimodalInputs) -> array[int]:
    padded: array[int] = pad_mm_tokens(input_ids, images)
    return padded


def extend_to_end(request: Req) -> None:
    request.extend_end = len(request.origin_input_ids)


def bind_slots(forward_batch: ForwardBatch, runner: ModelRunner) -> None:
    slots = runner.kv_index_translator
    slots.own_plan(forward_batch).bind(forward_batch, slots)


def patch_setter(model: Any) -> bool:
    return add_missing_setter(model)
