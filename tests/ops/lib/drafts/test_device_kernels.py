"""Attention, head and the training step as the device takes them (`--device`), against plain ones in float64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import attended, error, random_case
from case_reader import fast_step
from device_cases import tolerance
from draft_cases import random_case as random_step
from draft_cases import reference_gradients

from ops.lib.drafts.attention.blocks import choose_attention, dense_attention
from ops.lib.drafts.backbone.reference import reference_slot_losses
from ops.lib.drafts.losses.head import Bias
from ops.lib.drafts.losses.loss import Loss, slot_losses

DTYPES = [(torch.float32, 2e-5, 5e-3), (torch.bfloat16, 5e-2, 5e-2)]


@pytest.mark.parametrize(("dtype", "on_cpu", "on_gpu"), DTYPES)
@pytest.mark.parametrize(("D", "window"), [(16, None), (128, 24)])
def test_attention_on_the_device_has_the_values_and_gradients_of_the_dense_mask(
    device, D, window, dtype, on_cpu, on_gpu
):
    case = random_case(8, K=16, D=D, window=window)
    draft = random_step(0, head_dim=D, num_attention_heads=case.G * case.R, num_key_value_heads=case.G).config
    _, attend = choose_attention(device, draft, dtype)
    expected = attended(dense_attention, case, torch.float64)
    assert error(expected, attended(attend, case, dtype, str(device))) < tolerance(device, on_cpu, on_gpu)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "kl", "l1", "lk"])
def test_the_head_on_the_device_has_the_values_and_gradients_of_log_softmax(device, kind, biased, dtype, limit):
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 64), (300, 64), (5000, 64), (300, 16), (5000, 16))
    scales = (0.3, 0.3, 1, 0.3, 1)
    drawn = (torch.randn(*shape, generator=generator) * by for shape, by in zip(shapes, scales, strict=True))
    hidden, teacher, head, latent, table = (x.to(device, dtype) for x in drawn)
    labels = torch.randint(5000, (300,), generator=generator).to(device)
    leaves = [x.requires_grad_() for x in ((hidden, latent, table) if biased else (hidden,))]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found = slot_losses(kind, hidden, head, labels, teacher, Bias(latent, table) if biased else None)
    logits = wide[0] @ head.double().T + (wide[1] @ wide[2].T if biased else 0)
    expected = reference_slot_losses(kind, logits, labels, teacher.double() @ head.double().T)
    found.values_W.sum().backward()
    expected.sum().backward()
    pairs = [(found.values_W, expected), *((leaf.grad, there.grad) for leaf, there in zip(leaves, wide, strict=True))]
    if kind in ("l1", "lk"):
        limit = max(limit, 1e-3)  # the slope jumps where both distributions are nearly equal
    assert float(max((actual.double() - right).norm() / right.norm() for actual, right in pairs)) < limit
    if dtype == torch.float32:
        assert torch.equal(found.correct_W, logits.argmax(-1) == labels)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_on_the_device_in_bfloat16_and_float32_stays_near_the_float64_reference(device, seed):
    case = random_step(seed, samples=3, head_dim=16)
    reference, expected = reference_gradients(case)
    size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
    for dtype, loss_limit, limit in ((torch.float32, 1e-4, 1e-3), (torch.bfloat16, 5e-2, 0.2)):
        value, gradients, _ = fast_step(case.to(dtype), Loss(), device=device, anchor_chunk=5)
        assert value == pytest.approx(float(reference.loss.detach()), rel=loss_limit)
        off = sum(float((gradients[name] - gradient).norm()) ** 2 for name, gradient in expected.items()) ** 0.5
        assert off < tolerance(device, limit, 2 * limit) * size
