"""The calls that differ between the supported versions of SGLang: one interface, and a module for each version.

All other calls are the same in these versions. Loads neither torch nor sglang before `adapter` is called.
"""

from __future__ import annotations

import functools
from array import array
from typing import TYPE_CHECKING, Any, Protocol

from ops.lib.sglang.version import require_sglang

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class Adapter(Protocol):
    """The interface of a module for one version of SGLang, such as ops/lib/sglang/v0_5_23.py."""

    @property
    def NoPrefixes(self) -> type[Any]:
        """The class of a prefix cache that is always empty; SGLang queries it for each batch."""

    def tensor_transport(self) -> Any:
        """The setting for how SGLang's tokenizer process sends pixels to its scheduler."""

    def pad_image_tokens(self, input_ids: array[int], images: MultimodalInputs) -> array[int]:
        """The ids with SGLang's padding values in the places of the images."""

    def extend_to_end(self, request: Req) -> None:
        """Make the prefill of a request cover all of its ids."""

    def bind_slots(self, forward_batch: ForwardBatch, runner: ModelRunner) -> None:
        """Complete a batch made without a ScheduleBatch: set where the runner reads and writes keys and values."""

    def patch_setter(self, model: Any) -> bool:
        """Add the method that DFLASH needs to a model's class which lacks it; False if nothing is missing."""


@functools.cache
def adapter() -> Adapter:
    """The adapter for the installed version. Raises as `require_sglang` does."""
    if require_sglang("this part of dflow") == "0.5.21":
        from ops.lib.sglang import v0_5_21

        return v0_5_21
    from ops.lib.sglang import v0_5_23

    return v0_5_23
