"""Optimizers against torch's own, clipping, and the rate over the steps."""

import math

import pytest
import torch
from finetune_cases import config as finetune_config
from torch import nn
from torch._subclasses import FakeTensorMode

from ops.finetune_vlm.start import make_optimizer as finetune_optimizer
from ops.lib.training.muon import orthogonal
from ops.lib.training.optimizer import (
    adamw_options,
    clip_gradients,
    gradient_norm,
    learning_rate,
    limit_gradients,
    make_optimizer,
    named_state,
    restore_state,
    set_rate,
)


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4, bias=False))


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def run_steps(model, optimizer, seeds, rate=0.01):
    for seed in seeds:
        give_gradients(model, seed)
        set_rate(optimizer, rate)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_gives_the_numbers_of_torch_and_leaves_the_rest_to_adamw():
    ours = run_steps(model := small_model(), make_optimizer(model, 0.1, (0.9, 0.95), kind="muon"), range(4))
    model = small_model()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))
    for seed in range(4):
        give_gradients(model, seed)
        muon.step()
        adamw.step()
    for expected, got in zip(model.parameters(), ours, strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_does_not_depend_on_what_the_loss_is_divided_by(kind):
    def trained(times):
        optimizer = make_optimizer(model := small_model(), 0.1, kind=kind)
        for seed in range(4):
            give_gradients(model, seed)
            for parameter in model.parameters():
                parameter.grad *= times
            set_rate(optimizer, 0.01)
            optimizer.step()
        return list(model.parameters())

    # a power of two: Muon rounds to bfloat16, which then rounds alike
    for once, larger in zip(trained(1.0), trained(4.0), strict=True):
        torch.testing.assert_close(larger, once, rtol=1e-5, atol=1e-6)


def test_an_orthogonal_update_has_the_singular_vectors_of_its_matrix_and_values_near_one():
    for shape in ((12, 30), (30, 12), (16, 16)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ orthogonal(matrix).double() @ vh.T
        diagonal = inside.diagonal()
        assert 0.5 < diagonal.min()
        assert diagonal.max() < 1.3
        assert (inside - torch.diag(diagonal)).abs().max() < 0.05


def test_muon_is_given_matrices_only():
    optimizer = make_optimizer(nn.Conv1d(3, 4, 2), 0.1, kind="muon")
    assert [[parameter.ndim for parameter in group["params"]] for group in optimizer.param_groups] == [[], [3], [1]]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_restored_by_name_goes_on_bit_for_bit(kind):
    model = small_model()
    optimizer = make_optimizer(model, 0.1, kind=kind)
    run_steps(model, optimizer, range(3))
    other = small_model(seed=5)
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other, 0.1, kind=kind)
    state = {name: tensor.clone() for name, tensor in named_state(optimizer, model).items()}
    restore_state(resumed, other, dict(reversed(state.items())))
    expected = run_steps(model, optimizer, range(3, 6))
    for one, two in zip(expected, run_steps(other, resumed, range(3, 6)), strict=True):
        assert torch.equal(one, two)
    assert set(state) >= {"0.bias.exp_avg", "0.bias.step", "1.weight.exp_avg_sq"}
    assert ("2.weight.momentum_buffer" in state) == (kind == "muon")


def test_adamw_is_fused_on_cuda_and_left_to_torch_on_a_cpu():
    assert {"fused": True} == adamw_options(torch.device("cuda", 1))
    assert {} == adamw_options(torch.device("cpu"))
    for kind in ("adamw", "muon"):
        optimizer = make_optimizer(small_model(), 0.1, kind=kind)
        assert not any(group.get("fused") for group in optimizer.param_groups)
        with FakeTensorMode():
            model = nn.Module()
            model.matrix, model.norm = (nn.Parameter(torch.empty(shape, device="cuda")) for shape in ((6, 10), (10,)))
            groups = make_optimizer(model, 0.1, kind=kind).param_groups
        assert [True, True] == [group["fused"] for group in groups if "betas" in group]


def test_fine_tuning_takes_the_same_adamw():
    parts = {"matrix": "text", "norm": "text"}
    with FakeTensorMode():
        for device, expected in (("cuda", True), ("cpu", None)):
            model = nn.Module()
            model.matrix, model.norm = (nn.Parameter(torch.empty(shape, device=device)) for shape in ((6, 10), (10,)))
            groups = finetune_optimizer(finetune_config(), model, parts).param_groups
            assert [expected] * 2 == [group["fused"] for group in groups]


def test_a_state_goes_from_a_cpus_optimizer_to_a_fused_one_and_back():
    model, fused_model = small_model(), small_model()
    optimizer = make_optimizer(model, 0.1)
    fused = torch.optim.AdamW(fused_model.parameters(), lr=0.0, weight_decay=0.1, fused=True)
    optimizer.param_groups[1]["weight_decay"] = 0.1
    run_steps(model, optimizer, range(3))
    fused_model.load_state_dict(model.state_dict())
    restore_state(fused, fused_model, {name: x.clone() for name, x in named_state(optimizer, model).items()})
    expected = run_steps(model, optimizer, range(3, 6))
    for one, two in zip(expected, run_steps(fused_model, fused, range(3, 6)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    back = make_optimizer(fused_model, 0.1)
    restore_state(back, fused_model, {name: x.clone() for name, x in named_state(fused, fused_model).items()})
    assert [6.0] * 5 == [float(x) for name, x in named_state(back, fused_model).items() if name.endswith(".step")]


def test_the_norm_the_limit_and_the_update_read_nothing_from_the_device():
    """On the meta device there is nothing to be read."""
    model = small_model().to("meta")
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    norm = gradient_norm(model.parameters(), torch.device("meta"))
    assert ("meta", 0) == (norm.device.type, norm.ndim)
    limit_gradients(model.parameters(), 3.0, 1.0)
    for kind in ("adamw", "muon"):
        optimizer = make_optimizer(model, 0.1, kind=kind)
        set_rate(optimizer, 0.1)
        optimizer.step()


def test_zeroing_gradients_reaches_both_parts_of_muon():
    model = small_model()
    optimizer = make_optimizer(model, 0.0, kind="muon")
    give_gradients(model, 0)
    optimizer.zero_grad()
    assert [None] * 5 == [parameter.grad for parameter in model.parameters()]


def test_clipping_is_that_of_torch_and_reports_the_norm_before():
    for limit in (0.5, 100.0):
        ours, theirs = small_model(), small_model()
        give_gradients(ours, 3)
        give_gradients(theirs, 3)
        expected = float(nn.utils.clip_grad_norm_(theirs.parameters(), limit))
        assert pytest.approx(expected, rel=1e-6) == clip_gradients(ours.parameters(), limit)
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_reported_and_nothing_is_scaled(value):
    model = small_model()
    give_gradients(model, 0)
    model[0].weight.grad[2, 3] = value
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert not math.isfinite(clip_gradients(model.parameters(), 0.1))
    for gradient, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(torch.nan_to_num(gradient), torch.nan_to_num(parameter.grad))


def test_without_gradients_the_norm_is_zero():
    assert 0.0 == clip_gradients(small_model().parameters(), 1.0)


def test_a_cosine_goes_from_the_peak_towards_the_minimum():
    rates = [learning_rate(step, 10, 2.0, 0.2, min_ratio=0.1) for step in range(10)]
    expected = [1.0, 2.0] + [2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8))) for k in range(8)]
    assert expected == pytest.approx(rates, rel=1e-12)
    assert 0.2 == pytest.approx(learning_rate(10, 10, 2.0, 0.2, min_ratio=0.1))


def test_wsd_is_level_between_warm_up_and_decay():
    rates = [learning_rate(step, 20, 3.0, 0.1, "wsd", decay_ratio=0.25, min_ratio=0.0) for step in range(20)]
    decay = [3.0 * (1 - math.sqrt(k / 5)) for k in range(5)]
    assert [1.5, 3.0] + [3.0] * 13 + decay == pytest.approx(rates, rel=1e-12)
    assert 0.3 == pytest.approx(learning_rate(20, 20, 3.0, 0.1, "wsd", decay_ratio=0.25, min_ratio=0.1))


def test_wsd_decays_after_the_warm_up_where_both_overlap_and_may_not_decay_at_all():
    rates = [learning_rate(step, 4, 1.0, 0.5, "wsd", decay_ratio=1.0) for step in range(4)]
    assert [0.5, 1.0, 1.0, 1 - math.sqrt(0.5)] == pytest.approx(rates)
    assert [1.0] * 4 == [learning_rate(step, 4, 1.0, 0.0, "wsd", decay_ratio=0.0) for step in range(4)]
