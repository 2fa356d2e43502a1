"""The fast step against the dense reference: loss, right slots, and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch
from case_reader import drawn_samples, fast_step
from draft_cases import random_case, reference_gradients
from step_cases import assert_equal_steps

from ops.lib.drafts.losses.loss import Loss

KINDS = ("dflash", "dpace", "focal", "kl", "l1", "lk", "nla")


@pytest.mark.parametrize("seed", range(42))
def test_random_steps_equal_the_reference(seed):
    case = random_case(seed)
    assert_equal_steps(case, Loss(kind=KINDS[seed % len(KINDS)]))


@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_at_several_block_sizes(block_size, kind):
    assert_equal_steps(random_case(block_size, samples=3, block_size=block_size), Loss(kind=kind))


@pytest.mark.parametrize("anchors", [0, 1])
def test_one_anchor_and_none(anchors):
    for seed in range(4):
        case = random_case(seed, anchors=anchors)
        assert case.anchors == anchors
        assert_equal_steps(case, Loss())


@pytest.mark.parametrize("anchor_chunk", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_anchors_change_nothing(anchor_chunk, kind):
    assert_equal_steps(random_case(7, samples=3), Loss(kind=kind), anchor_chunk=anchor_chunk)


def test_micro_batches_change_nothing():
    case = random_case(3, samples=4)
    count = len(drawn_samples(case))
    assert count > 2
    assert_equal_steps(case, Loss(), micro_batches=[[place] for place in reversed(range(count))])


def test_activation_checkpointing_changes_nothing():
    assert_equal_steps(random_case(5), Loss(), activation_checkpointing=True, anchor_chunk=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_layers_change_nothing():
    assert_equal_steps(random_case(3, samples=3, num_hidden_layers=2), Loss(), compiled=True, anchor_chunk=4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_step_on_a_gpu_stays_near_the_float64_reference(compiled):
    for seed in range(6):
        case = random_case(seed, samples=3, head_dim=16)
        reference, expected = reference_gradients(case)
        options = {"device": torch.device("cuda"), "compiled": compiled, "anchor_chunk": 5}
        value, gradients, _ = fast_step(case.to(torch.float32), Loss(), **options)
        assert value == pytest.approx(float(reference.loss.detach()), rel=1e-4)
        off = sum(float((gradients[name] - gradient).norm()) ** 2 for name, gradient in expected.items()) ** 0.5
        size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
        assert off < 1e-3 * size


def test_float32_stays_near_the_float64_reference():
    for seed in range(6):
        case = random_case(seed, samples=3)
        reference, expected = reference_gradients(case)
        value, gradients, _ = fast_step(case.to(torch.float32), Loss())
        assert value == pytest.approx(float(reference.loss.detach()), rel=1e-5)
        off = sum(float((gradients[name] - gradient).norm()) ** 2 for name, gradient in expected.items()) ** 0.5
        size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
        assert off < 1e-5 * size
