"""The losses against loops over slots, and their denominators."""

import math

import pytest
import torch
from attrs import frozen

from ops.lib.drafts.losses.loss import Loss, combine, denominator, dpace_weights
from ops.lib.drafts.losses.slots import block_weights


def slots(seed=0, blocks=5, block_size=6):
    """Weights with a hole and an empty block, the weighted slots, and a cross-entropy for each."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.exp(-(torch.arange(block_size) - 1) / 3).repeat(blocks, 1)
    weights[:, 0] = 0
    weights[1, 3:] = 0
    weights[2] = 0
    rows = weights.flatten().nonzero()[:, 0]
    return weights, rows, torch.rand(len(rows), generator=generator, dtype=torch.float64) * 3


def looped(loss, values, weights, rows):
    """The sum slot by slot, from plain numbers; `values` are tensors with a gradient, so that it has one too."""
    block_size = weights.shape[1]
    value = dict(zip(rows.tolist(), values, strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for block in range(len(weights)):
        if loss.kind != "dpace":
            for k in range(1, block_size):
                if weights[block, k] > 0:
                    ce = value[block * block_size + k]
                    factor = (1 - torch.exp(-ce)) ** loss.focal_gamma if loss.kind == "focal" else 1
                    total = total + weights[block, k].double() * factor * ce
            continue
        length = 0
        while length + 1 < block_size and weights[block, length + 1] > 0:
            length += 1
        own = [value[block * block_size + k] for k in range(1, length + 1)]
        smoothed = [(1 - loss.dpace_alpha) * math.exp(-ce.item()) + loss.dpace_alpha for ce in own]
        for j, ce in enumerate(own):
            total = total + sum(math.prod(smoothed[: m + 1]) for m in range(j, length)) * ce
    return total


@pytest.mark.parametrize(
    "loss",
    [
        Loss(),
        Loss(kind="kl"),
        Loss(kind="nla"),
        Loss(kind="focal"),
        Loss(kind="focal", focal_gamma=0.5),
        Loss(kind="focal", focal_gamma=0.0),
        Loss(kind="dpace"),
        Loss(kind="dpace", dpace_alpha=0.0),
        Loss(kind="dpace", dpace_alpha=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loss_and_its_gradient_equal_a_loop_over_slots(loss, seed):
    weights, rows, values = slots(seed)
    expected_values, actual_values = values.clone().requires_grad_(), values.clone().requires_grad_()
    expected = looped(loss, expected_values, weights, rows)
    actual = combine(loss, actual_values, weights, rows)
    assert torch.float64 == actual.dtype and () == actual.shape
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    expected.backward()
    actual.backward()
    torch.testing.assert_close(actual_values.grad, expected_values.grad, rtol=1e-12, atol=1e-14)


def test_float32_values_are_summed_in_float64():
    weights, rows, values = slots()
    expected = (weights.flatten()[rows].double() * values.float().double()).sum()
    torch.testing.assert_close(combine(Loss(), values.float(), weights, rows), expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", ["dflash", "dpace", "focal", "kl", "l1", "lk", "nla"])
def test_no_weighted_slot_gives_a_loss_of_zero_that_can_be_differentiated(kind):
    values = torch.zeros(0, requires_grad=True)
    loss = combine(Loss(kind=kind), values, torch.zeros(2, 4), torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert 0.0 == loss.item()
    assert (0,) == values.grad.shape


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_the_focal_gradient_of_a_certain_label_is_finite(gamma):
    values = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    combine(Loss(kind="focal", focal_gamma=gamma), values, torch.tensor([[0.0, 1.0]]), torch.tensor([1])).backward()
    assert [1.0 if gamma == 0 else 0.0] == pytest.approx(values.grad.tolist(), abs=1e-100)


def test_the_focal_gradient_goes_through_both_factors():
    ce = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    combine(Loss(kind="focal"), ce, torch.tensor([[0.0, 1.0]]), torch.tensor([1])).backward()
    p = math.exp(-0.7)
    assert [pytest.approx((1 - p) ** 2 + 2 * (1 - p) * p * 0.7, rel=1e-14)] == ce.grad.tolist()


def test_dpace_weights_have_no_gradient_and_a_slot_behind_a_hole_has_none():
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    rows = torch.tensor([1, 3])
    q = 0.5 * math.exp(-1.0) + 0.5
    actual = dpace_weights(torch.tensor([1.0, 2.0]), weights, rows, alpha=0.5)
    assert [pytest.approx(q, rel=1e-15), 0.0] == actual.tolist()


def test_the_denominator_is_the_sum_of_the_weights_and_for_dpace_the_number_of_blocks():
    weights, _rows, _values = slots()
    for kind in ("dflash", "focal", "kl", "l1", "lk", "nla"):
        assert float(weights.double().sum()) == denominator(Loss(kind=kind), weights)
    assert 4.0 == denominator(Loss(kind="dpace"), weights)
    assert 0.0 == denominator(Loss(kind="dpace"), torch.zeros(3, 4))


@frozen
class OwnTerms:
    """An algorithm's terms, with its weight of the base."""

    base: float = 0.25
    needs_teacher: bool = False

    def sizes(self):
        return {}


def test_with_dpace_an_algorithms_own_term_has_the_weights_of_the_base_and_not_of_its_own_confidences():
    weights, rows, base = slots()
    own = base.flip(0) * 2  # sure where the base is not
    loss = Loss(kind="dpace", own=OwnTerms())
    contributions = dpace_weights(base, weights, rows, loss.dpace_alpha)
    expected = sum(
        c * (0.25 * b + o) for c, b, o in zip(*(each.tolist() for each in (contributions, base, own)), strict=True)
    )
    assert pytest.approx(expected, rel=1e-13) == float(combine(loss, base, weights, rows, own))
    of_its_own = dpace_weights(own, weights, rows, loss.dpace_alpha)  # as speculators weighs the selector's
    assert abs(float((contributions * own).sum() - (of_its_own * own).sum())) > 0.1 * float((contributions * own).sum())


@pytest.mark.parametrize(
    ("block_size", "gamma", "times"), [(8, 4.0, 1.9), (10, 4.0, 2.2), (16, 7.0, 2.3), (16, 4.0, 3.4), (17, 4.0, 3.6)]
)
def test_a_mean_over_slots_is_smaller_than_one_over_weights_by_what_the_documentation_says(block_size, gamma, times):
    weights = block_weights(block_size, gamma)[None]
    values = torch.ones(block_size - 1, dtype=torch.float64)
    rows = torch.arange(1, block_size)
    total = float(combine(Loss(), values, weights, rows))
    over_slots = total / (block_size - 1)
    assert times == round(total / denominator(Loss(), weights) / over_slots, 1)
