"""The fast step beside the dense reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_reader import fast_step
from draft_cases import Case, reference_gradients

from ops.lib.drafts.losses.loss import Loss


def assert_equal_steps(case: Case, loss: Loss, rtol: float = 1e-10, **options: Any) -> None:
    """Assert that fast step and reference agree in loss, right slots, and the gradient of every parameter."""
    reference, expected = reference_gradients(case, kind=loss.kind, own=loss.own)
    value, gradients, outcomes = fast_step(case, loss, **options)
    assert value == pytest.approx(float(reference.loss.detach()), rel=rtol, abs=1e-14)
    K = case.config.block_size
    seen, correct = torch.zeros(K, dtype=torch.int64), torch.zeros(K, dtype=torch.int64)
    for slots in outcomes:
        seen += torch.bincount(slots.slots_W.cpu(), minlength=K)
        correct += torch.bincount(slots.slots_W[slots.correct_W].cpu(), minlength=K)
    assert seen.tolist() == reference.seen_K.tolist()
    assert correct.tolist() == reference.correct_K.tolist()
    assert gradients.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=rtol, atol=rtol * max(scale, 1e-3), msg=name)
