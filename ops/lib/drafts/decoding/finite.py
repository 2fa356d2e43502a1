"""Logits that are no numbers are an error: argmax takes one of them for the best, and every token would look right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsl.errors import DataError


def check_finite(values_BK: Tensor, model: str, dtype: torch.dtype, place: Callable[[int, int], str]) -> None:
    """Raise DataError where a value that a token is chosen by is nan or infinite.

    model: "target" or "draft". place(row, column): where that is, in words.
    """
    wrong = (~values_BK.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        named = str(dtype).removeprefix("torch.")
        raise DataError(
            f"{place(row, column)}: the {model}'s logits are not finite numbers in {named}, so no token can be chosen "
            "by them. Decode in float32 (float16 overflows above 65504): where they are not finite there either, the "
            f"{model}'s weights are damaged"
        )
