"""Weights cast once a step: the bits of casting them at every use, and how often they are cast."""

import attrs
import pytest
import torch
from draft_chain import make_inputs, train_config
from fake_stage import FakeStage
from op_counts import Recorded, casts_of, memory_of
from torch import nn

from ops.lib.training.weights import WorkingWeights
from ops.train_dflash.engine import set_up
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.run import train_dflash
from ops.train_dflash.step import train_step
from ops.train_dflash.tally import LOSS

SHAPE = {"dtype": "bfloat16", "num_layers": 2, "micro_batch_tokens": 40, "anchor_chunk": 5}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def step_of(inputs, folder, cast_every_use=False, steps=1, **changes):
    """Tally, gradients and operations of some steps without an update."""
    config = train_config(**SHAPE | changes)
    stage = FakeStage(folder, inputs)
    opened = open_inputs(config, stage)
    setup = set_up(config, stage, opened)
    engine = setup.engine
    if cast_every_use:
        engine = attrs.evolve(engine, computing=attrs.fields(type(engine)).computing.default)
    stream = setup.train.steps(opened.steps[:steps], 0)
    recorded = Recorded()
    with recorded:
        tallies = [train_step(engine, stream, 1) for _ in range(steps)]
    gradients = {name: parameter.grad for name, parameter in engine.model.named_parameters()}
    return tallies, gradients, recorded, engine.model


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"loss": "dpace"}], ids=str)
def test_gradients_are_those_of_casting_at_every_use_to_the_last_bit(inputs, tmp_path, changes):
    expected, by_use, _, _ = step_of(inputs, tmp_path, cast_every_use=True, steps=2, **changes)
    got, gradients, _, _ = step_of(inputs, tmp_path, steps=2, **changes)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
    for name, gradient in by_use.items():
        assert torch.float32 == gradients[name].dtype
        assert torch.equal(gradient, gradients[name]), name
        assert gradient.abs().max() > 0


def test_a_step_casts_every_weight_once_however_many_passes_it_takes(inputs, tmp_path):
    _, _, by_use, model = step_of(inputs, tmp_path, cast_every_use=True)
    weights = list(model.parameters())
    assert len(casts_of(by_use, weights)) > 4 * len(weights)
    _, _, recorded, model = step_of(inputs, tmp_path)
    weights = list(model.parameters())
    assert [] == casts_of(recorded, weights)
    (call,) = recorded.of("aten::_foreach_copy_")
    copies, masters = call.arguments
    assert memory_of(weights) == memory_of(masters)
    assert {torch.bfloat16} == {copy.dtype for copy in copies}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_layers_compute_with_the_copies(inputs, tmp_path):
    torch._dynamo.reset()
    expected, by_use, _, _ = step_of(inputs, tmp_path)
    got, gradients, _, model = step_of(inputs, tmp_path, compile=True)
    assert float(got[0][LOSS]) == pytest.approx(float(expected[0][LOSS]), rel=2e-2)
    off = sum(float((gradients[name] - gradient).norm()) ** 2 for name, gradient in by_use.items()) ** 0.5
    size = sum(float(gradient.norm()) ** 2 for gradient in by_use.values()) ** 0.5
    assert 0 < size
    assert off < 0.05 * size
    assert {torch.float32} == {parameter.dtype for parameter in model.parameters()}


def test_the_copies_follow_the_masters_and_go_after_an_error_too():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    masters = dict(model.named_parameters())
    working = WorkingWeights(model, torch.bfloat16)
    for change in (0.0, 1.5):
        with torch.no_grad():
            model[0].weight.add_(change)
        with working.in_place():
            for name, copy in model.named_parameters():
                assert torch.equal(masters[name].bfloat16(), copy)
    with pytest.raises(KeyError), working.in_place():
        raise KeyError
    assert all(parameter is masters[name] for name, parameter in model.named_parameters())


def test_passes_add_up_in_the_dtype_of_the_masters_and_frozen_weights_get_nothing():
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    working = WorkingWeights(model, torch.bfloat16)
    small = 2.0**-9  # 1 + 2^-9 is no bfloat16
    with working.in_place():
        for value in (1.0, small):
            model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert 1.0 + small == float(model.weight.grad)
    assert model.bias.grad is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_draft_that_computes_in_the_dtype_of_its_masters_is_not_copied(inputs, tmp_path, dtype):
    _, _, recorded, model = step_of(inputs, tmp_path, dtype=dtype)
    assert [] == recorded.of("aten::_foreach_copy_")
    assert [] == casts_of(recorded, list(model.parameters()))


def test_a_training_in_bfloat16_keeps_float32_masters_and_moments(inputs, tmp_path):
    stage = FakeStage(tmp_path, inputs)
    train_dflash(train_config(**SHAPE, max_steps=4, ema_decay=0.5, eval_every=2, log_every=1, lr=5e-3), stage)
    losses = stage.metric("train/loss")
    assert losses[-1] < losses[0]
    assert 2 == len(stage.metric("val/loss"))
