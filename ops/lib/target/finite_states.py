"""States of a target that are not finite: found before they are stored or trained on.

T rows of several samples, W width
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsl.errors import DataError

FINAL = ("the final norm",)  # which the final hidden states come from


def check_finite(states_TW: Tensor, rows: Sequence[tuple[str, int]], parts: Sequence[str], setting: str) -> None:
    """Raises DataError for values that are not finite, with the sample, the part and what to do.

    rows: id and number of rows of each sample, one after the other. parts: what equal shares of the width come from.
    setting: the field of the op that holds their dtype. One pass over the states, whose result is waited for.
    """
    if not states_TW.numel() or bool(torch.stack(torch.aminmax(states_TW)).isfinite().all()):
        return
    ids, counts = zip(*rows, strict=True)
    for name, states in zip(ids, states_TW.split(list(counts)), strict=True):
        wrong = ~states.isfinite()
        if bool(wrong.any()):
            first = next(part for part, share in zip(parts, wrong.chunk(len(parts), 1), strict=True) if share.any())
            dtype = str(states.dtype).removeprefix("torch.")
            raise DataError(
                f"sample {name}: {int(wrong.sum()):,} of {wrong.numel():,} captured values are not finite in {dtype}, "
                f"first in those of {first}; {_remedy(states.dtype, setting)}"
            )


def layer_parts(layer_ids: Sequence[int]) -> list[str]:
    """The parts of features."""
    return [f"layer {layer}" for layer in layer_ids]


def _remedy(dtype: torch.dtype, setting: str) -> str:
    if dtype == torch.float16:
        return f'float16 holds values up to {torch.finfo(dtype).max:,.0f}: set {setting} to "bfloat16" or "float32"'
    wider = "" if dtype == torch.float32 else f', or set {setting} to "float32"'
    return f"the target computes them so: look for damaged weights, and at this sample{wider}"
