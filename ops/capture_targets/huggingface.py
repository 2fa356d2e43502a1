"""Capture with transformers: hooks on the decoder layers of a target in this process.

B batch, S padded length, F = layers * hidden size, M hidden size
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from ops.artifacts import TargetModel
from ops.capture_targets.backend import States
from ops.capture_targets.op import CaptureTargets
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.model import Target


@define(eq=False)
class HuggingFaceBackend:
    """A target of transformers."""

    target: Target

    @classmethod
    def load(cls, config: CaptureTargets, target: TargetModel, device: str) -> HuggingFaceBackend:
        return cls(Target.load(target, device, getattr(torch, config.dtype)))

    def forward(
        self, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
    ) -> list[States]:
        """One pass, padded on the right, without the padding's states; on the target's device."""
        features_BSF, final_BSM = device_batch(self.target, samples, layer_ids, final_hidden=final_hidden)
        lengths = [len(sample.input_ids) for sample in samples]
        return [
            States(features_BSF[place, :length], None if final_BSM is None else final_BSM[place, :length])
            for place, length in enumerate(lengths)
        ]

    def any_rank(self, flag: bool) -> bool:
        """Each rank has a model of its own."""
        return flag

    def close(self) -> None:
        """Its memory is freed with the object."""


def forward_batch(
    target: Target, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The result of `device_batch`, on the CPU."""
    features_BSF, final_BSM = device_batch(target, samples, layer_ids, final_hidden=final_hidden)
    return features_BSF.cpu(), None if final_BSM is None else final_BSM.cpu()


@torch.inference_mode()
def device_batch(
    target: Target, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Features [B, S, F] and, if requested, final hidden states [B, S, M] of one forward pass, padded, on the target's
    device, without waiting for it.

    Samples with and without images can be mixed. Pixel rows need no separate budget: merge_size^2 of them make an
    image token, and vision attention stays within an image.
    """
    with target.capture_inputs(layer_ids) as captured:
        final_BSM = target.hidden(target.inputs(samples))
    return captured.features(), final_BSM if final_hidden else None
