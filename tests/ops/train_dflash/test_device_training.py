"""Training on the device (`--device`): measuring, FSDP2 and collectives; nccl on a GPU, gloo on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from case_reader import CaseReader, drawn_samples, make_engine, prepare
from device_cases import tolerance
from draft_cases import random_case
from draft_chain import TEXT, make_features, make_plan, make_target, train_config
from fake_stage import FakeStage

from executor.launchers.rank_processes import rank_environment
from ops.lib.drafts.losses.loss import Loss, denominator
from ops.lib.sequence_parallel.exchange import flat_mesh, make_mesh
from ops.lib.training import rank_group
from ops.lib.training.dtensors import gathered, reshard
from ops.train_dflash.batches import Place
from ops.train_dflash.engine import weights_to_compute_with
from ops.train_dflash.run import train_dflash
from ops.train_dflash.sharding import shard_model

# The compiler of a GPU warns of its own affairs.
pytestmark = pytest.mark.filterwarnings("default")
WIDE_HEADS = {"head_dim": 16, "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [4, 2, 2]}}


@pytest.fixture(scope="module")
def group(device):
    """A process group of this process alone, over the backend that training takes on the device."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank_environment(0, 1).items():
            patch.setenv(name, value)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        yield backend
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    target = make_target(folder / "target", TEXT | WIDE_HEADS)
    features = make_features(folder / "features", target)
    return {"target": target, "features": features, "batches": make_plan(folder / "plan", features)}


def assert_near(expected, stage, name, rel):
    assert stage.metric(name) == pytest.approx(expected.metric(name), rel=rel)
    assert len(stage.metric(name)) > 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_on_the_device_measures_what_float64_on_a_cpu_measures(device, inputs, tmp_path, optimizer):
    config = {"max_steps": 4, "log_every": 1, "eval_every": 2, "lr": 3e-3, "ema_decay": 0.5, "optimizer": optimizer}
    reference = FakeStage(tmp_path / "reference", inputs)
    train_dflash(train_config(**config, dtype="float64"), reference)
    stage = FakeStage(tmp_path / "on the device", inputs, device=device.type)
    train_dflash(train_config(**config, dtype="float32"), stage)
    muon = optimizer == "muon"  # it rounds to bfloat16
    for name in ("train/loss", "val/loss"):
        assert_near(reference, stage, name, tolerance(device, 1e-2 if muon else 1e-5, 2e-2 if muon else 5e-3))
    assert [2, 4] == [step for metrics, step in stage.logged if "val/loss" in metrics]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_ranks_exchange_arrives_over_the_backend_of_the_device(device, group, dtype):
    sent = torch.arange(4096, device=device).to(dtype)
    got = [torch.zeros_like(sent) for _ in range(3)]
    dist.all_to_all_single(got[0], sent)
    work = dist.all_reduce(got[1].copy_(sent), async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(got[2].copy_(sent), 0)
    assert all(torch.equal(sent, each) for each in got)
    assert [{"rank": 0}] == rank_group.collected({"rank": 0})
    assert rank_group.any_rank(True, device)
    assert not rank_group.any_rank(False, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2_on_one_rank_has_the_loss_and_the_gradients_of_a_plain_model(device, group, dtype):
    """Masters are float32 in both, and cast once a step, which has several passes; layers are compiled on a GPU."""
    case = random_case(3, samples=4, head_dim=16).to(dtype)
    drawn = drawn_samples(case)
    total = sum(denominator(Loss(), sample.weights_AK) for sample in drawn)
    place = Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=device, dtype=dtype)
    batches = [prepare(CaseReader(case), [sample], place) for sample in drawn]

    def step(sharded):
        engine = make_engine(case, Loss(), compiled=device.type == "cuda", device=device, anchor_chunk=3)
        model = engine.model.to(torch.float32)
        if sharded:
            shard_model(model, flat_mesh(make_mesh(1, 1, device)), dtype)
        else:
            engine = evolve(engine, computing=weights_to_compute_with(model, dtype))
        rank_group.hold_gradients(model)
        with engine.computing():
            losses = [engine.train(batch, 1 / total).loss for batch in batches[:-1]]
            before = (partial(rank_group.release_gradients, model), partial(rank_group.release_parts, model))
            losses.append(engine.train(batches[-1], 1 / total, *before).loss)
        reshard(model)
        return torch.stack(losses), {name: gathered(weight.grad) for name, weight in model.named_parameters()}

    (expected_losses, expected), (losses, gradients) = step(False), step(True)
    limit = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(losses, expected_losses, rtol=limit, atol=0)
    assert expected.keys() == gradients.keys()
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= limit * float(gradient.norm()), name
