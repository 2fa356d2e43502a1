"""How far two ways of computing the same numbers may be apart.

Bits are compared only where the same computation ran twice. Two ways add the same products in another order, or by
another kernel, and which one a library takes depends on the processor.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_equal_within_rounding(expected: Tensor, actual: Tensor, roundings: int = 8) -> None:
    """Assert that tensors differ by at most `roundings` times eps of the dtype times the largest expected value."""
    assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
    expected, actual = expected.detach(), actual.detach()
    rounding = torch.finfo(expected.dtype).eps * float(expected.abs().max())
    assert float((expected - actual).abs().max()) <= roundings * rounding
