"""The interface of a capture backend, the one of transformers, and halving of batches that do not fit into memory.

B batch, S tokens of a sample or padded length, F = layers * hidden size, M hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from attrs import define, frozen
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.capture_targets.op import CaptureTargets
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.chunked_prefill import hidden_states
from ops.lib.target.model import Target


@frozen(eq=False)
class States:
    """The states of one sample, on the CPU or the target's device.

    features: [S, F]. final_hidden: the states after the final norm, [S, M], or None.
    """

    features: Tensor
    final_hidden: Tensor | None


class Backend(Protocol):
    """A loaded target that captures features: the inputs of layers k+1 for each requested layer k."""

    def forward(
        self, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
    ) -> list[States]:
        """The states of each sample, from one forward pass over all of them."""

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on one of the ranks that share this model; a collective of these ranks."""

    def close(self) -> None:
        """Free the target's memory."""


@define(eq=False)
class Halving:
    """A backend that halves a batch which does not fit into memory, and all later batches of its size.

    shares_model: other ranks run the same passes. When memory runs out here, they are in the middle of a pass, so it
    cannot be retried, and the error is raised.
    """

    backend: Backend
    info: Callable[[str], None] = print
    shares_model: bool = False
    _fits: int | None = None  # padded tokens; None until memory runs out once

    def forward(
        self, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
    ) -> list[States]:
        """The states of each sample. Raises DataError for a sample that does not fit alone."""
        padded = len(samples) * max(len(sample.input_ids) for sample in samples)
        if len(samples) > 1 and self._fits is not None and padded > self._fits:
            return self._in_halves(samples, layer_ids, final_hidden)
        try:
            return self.backend.forward(samples, layer_ids, final_hidden=final_hidden)
        except torch.OutOfMemoryError as error:
            if self.shares_model:
                raise DataError(
                    f"out of memory in a batch of {padded:,} tokens on a rank that shares the model with others: "
                    "reduce batch_tokens, or increase tp_degree"
                ) from error
            if len(samples) == 1:
                raise DataError(
                    f"sample {samples[0].id}: its {padded:,} tokens do not fit into the device's memory: drop "
                    "it with max_length of tokenize_chat, or capture fewer layers"
                ) from error
        # After the except clause, whose traceback holds the tensors of the failed pass.
        self._fits = padded // 2
        self.info(f"out of memory with {padded:,} tokens; later batches have at most {self._fits:,}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._in_halves(samples, layer_ids, final_hidden)

    def _in_halves(self, samples: Sequence[TokenSample], layer_ids: Sequence[int], final_hidden: bool) -> list[States]:
        half = len(samples) // 2
        return [
            *self.forward(samples[:half], layer_ids, final_hidden=final_hidden),
            *self.forward(samples[half:], layer_ids, final_hidden=final_hidden),
        ]


@define(eq=False)
class HuggingFaceBackend:
    """A backend that runs the target by transformers."""

    target: Target

    @classmethod
    def load(cls, config: CaptureTargets, target: TargetModel, device: str) -> HuggingFaceBackend:
        return cls(Target.load(target, device, getattr(torch, config.dtype)))

    def forward(
        self, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
    ) -> list[States]:
        """The states of each sample, from one right-padded pass; on the target's device, without the padding."""
        features_BSF, final_BSM = device_batch(self.target, samples, layer_ids, final_hidden=final_hidden)
        lengths = [len(sample.input_ids) for sample in samples]
        return [
            States(features_BSF[place, :length], None if final_BSM is None else final_BSM[place, :length])
            for place, length in enumerate(lengths)
        ]

    def any_rank(self, flag: bool) -> bool:
        """Return the flag: each rank has its own model, so there is no other rank to ask."""
        return flag

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


def forward_batch(
    target: Target, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The features and final states of `device_batch`, copied to the CPU."""
    features_BSF, final_BSM = device_batch(target, samples, layer_ids, final_hidden=final_hidden)
    return features_BSF.cpu(), None if final_BSM is None else final_BSM.cpu()


@torch.inference_mode()
def device_batch(
    target: Target, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Features [B, S, F] and, if requested, final hidden states [B, S, M] of one padded forward pass.

    They stay on the target's device, which is not waited for. Samples with and without images can be mixed. Pixel rows
    need no separate budget: merge_size^2 of them make an image token, and vision attention stays within an image.
    Raises DataError, with its name, for a sample whose images the model does not take.
    """
    inputs = target.inputs(samples)
    try:
        with target.capture_inputs(layer_ids) as captured:
            final_BSM = hidden_states(target, inputs)
    except DataError as error:
        if len(samples) == 1:
            raise DataError(f'sample "{samples[0].id}": {error}') from error
    else:
        return captured.features(), final_BSM if final_hidden else None
    # A sample that is refused alone is named; if none is, only their batch was, and each one's states are the result.
    alone = [device_batch(target, [sample], layer_ids, final_hidden=final_hidden) for sample in samples]
    features_BSF = pad_sequence([features[0] for features, _ in alone], batch_first=True)
    finals = [final[0] for _, final in alone if final is not None]
    return features_BSF, pad_sequence(finals, batch_first=True) if finals else None
