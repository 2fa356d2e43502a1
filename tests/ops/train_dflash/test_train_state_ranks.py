"""Optimizers, clipping, averages and checkpoints of a model that FSDP2 shards over two gloo ranks, against one."""

import multiprocessing
import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meeting import meeting
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ops.lib.training.checkpoint import Checkpoints, TrainState, load_checkpoint
from ops.lib.training.dtensors import gathered, reshard
from ops.lib.training.optimizer import clip_gradients, make_optimizer, set_rate
from ops.lib.training.weights import Ema

KINDS = ("adamw", "muon")
IDENTITY = {"config": {"lr": 0.1}}
STEPS, MORE = 4, 3


def new_state(kind, sharded, seed=0):
    """Five matrices of odd shapes: tall, square, wide; of one of them, with one row, the second rank has nothing."""
    torch.manual_seed(seed)
    sizes = (6, 11, 11, 1, 3, 8)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return TrainState(model, make_optimizer(model, 0.1, kind=kind), [], Ema(model, 0.9))


def train(state, steps):
    """Both ranks take the same batch, so that the averaged gradient is that of one process to the last bit."""
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.step)
        x = torch.randn(8, 6, generator=generator)
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        norm = clip_gradients(state.model.parameters(), 0.05)
        set_rate(state.optimizer, 0.01)
        state.optimizer.step()
        state.ema.update()
        state.counters["seen"] = state.counters.get("seen", 0) + 8
        state.history.append(torch.tensor([norm], dtype=torch.float64))


def whole(state):
    """Weights, averages and norms in full."""
    reshard(state.model)
    return {
        "weights": [gathered(parameter) for parameter in state.model.parameters()],
        "ema": [gathered(average) for average in state.ema.weights.values()],
        "norms": torch.stack(state.history),
        "counters": (state.counters, state.ema.updates),
    }


def swapped_outputs(state):
    """The model's output before, inside and after a swap, each without backward, and once more from its shards."""
    x = torch.ones(2, 6)
    with torch.no_grad():
        outputs = [state.model(x).clone()]
        with state.ema.swapped():
            outputs.append(state.model(x).clone())
        outputs.append(state.model(x).clone())
        reshard(state.model)
        outputs.append(state.model(x).clone())
    return outputs


def broken_norm(state):
    """The norm that each rank reports where one rank's part of the gradient is not finite, and whether it was kept."""
    state.model(torch.ones(2, 6)).sum().backward()
    gradient = state.model[0].weight.grad
    if dist.get_rank() == 1:
        gradient.to_local()[0, 0] = float("nan")
    before = gradient.to_local().clone()
    norm = clip_gradients(state.model.parameters(), 1e-9)
    kept = torch.equal(before.nan_to_num(), gradient.to_local().nan_to_num())
    state.optimizer.zero_grad()
    return norm, kept


def one_of_two(rank, folder, place):
    torch.set_num_threads(1)
    os.environ |= {**place, "RANK": str(rank)}
    dist.init_process_group("gloo")
    results = {}
    for kind in KINDS:
        state = new_state(kind, sharded=True)
        train(state, STEPS)
        with Checkpoints(folder / f"by-two-{kind}", IDENTITY, rank=rank) as checkpoints:
            checkpoints.save(state)
            checkpoints.wait()
        results[kind] = {"outputs": swapped_outputs(state), "after": whole(state)}
        train(state, MORE)
        results[kind]["later"] = whole(state)
        for place in ("by-two", "by-one"):
            resumed = new_state(kind, sharded=True, seed=7)
            found = load_checkpoint(folder / f"{place}-{kind}", resumed, IDENTITY)
            train(resumed, MORE)
            results[kind][place] = whole(resumed) | {"found": found}
        results[kind]["nothing"] = load_checkpoint(folder / "empty", new_state(kind, sharded=True), IDENTITY)
        results[kind]["broken"] = broken_norm(state)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder, each rank's results, and those of one process: kind -> (state after STEPS, state after MORE)."""
    folder = tmp_path_factory.mktemp("two_ranks")
    alone = {}
    for kind in KINDS:
        state = new_state(kind, sharded=False)
        train(state, STEPS)
        (folder / f"by-one-{kind}").mkdir()
        (folder / f"by-two-{kind}").mkdir()
        with Checkpoints(folder / f"by-one-{kind}", IDENTITY, rank=0) as checkpoints:
            checkpoints.save(state)
        after = whole(state)
        after = {key: [x.clone() for x in value] if isinstance(value, list) else value for key, value in after.items()}
        train(state, MORE)
        alone[kind] = (after, whole(state))
    (folder / "empty").mkdir()
    # Left of a write that was cut short: never taken.
    (folder / "by-two-muon" / "checkpoint-00000099.tmp").mkdir()
    # The server imports torch once for both ranks; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.lib.training.checkpoint"])
    with meeting(2) as place:
        mp.start_processes(one_of_two, (folder, place), nprocs=2, start_method="forkserver")
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
    return folder, results, alone


def assert_close(expected, got, exactly=False):
    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-5, "atol": 2e-6}
    for key in ("weights", "ema"):
        for one, two in zip(expected[key], got[key], strict=True):
            torch.testing.assert_close(two, one, **tolerance)
    torch.testing.assert_close(got["norms"], expected["norms"], **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_under_fsdp2_are_those_of_one_process_within_rounding(two_ranks, kind):
    _, results, alone = two_ranks
    for rank in (0, 1):
        assert_close(alone[kind][0], results[rank][kind]["after"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_resumes_on_two_bit_for_bit(two_ranks, kind):
    _, results, _ = two_ranks
    for rank in (0, 1):
        resumed = results[rank][kind]["by-two"]
        assert resumed["found"]
        assert_close(results[rank][kind]["later"], resumed, exactly=True)
        assert results[rank][kind]["later"]["counters"][1] == resumed["counters"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_the_other_way_round(two_ranks, kind):
    folder, results, alone = two_ranks
    assert_close(alone[kind][1], results[0][kind]["by-one"])
    state = new_state(kind, sharded=False, seed=9)
    assert load_checkpoint(folder / f"by-two-{kind}", state, IDENTITY)
    assert STEPS == state.step == state.ema.updates
    assert_close(results[0][kind]["after"], whole(state), exactly=True)
    train(state, MORE)
    assert_close(alone[kind][1], whole(state))


def test_ranks_agree_that_there_is_nothing_to_resume(two_ranks):
    _, results, _ = two_ranks
    assert [False] * 4 == [results[rank][kind]["nothing"] for rank in (0, 1) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_swapped_in_and_out_although_fsdp2_holds_gathered_weights(two_ranks, kind):
    _, results, _ = two_ranks
    before, inside, after, from_shards = results[0][kind]["outputs"]
    assert not torch.equal(before, inside)
    assert torch.equal(before, after)
    assert torch.equal(before, from_shards)
    model = new_state(kind, sharded=False).model
    for parameter, average in zip(model.parameters(), results[0][kind]["after"]["ema"], strict=True):
        parameter.data.copy_(average)
    torch.testing.assert_close(inside, model(torch.ones(2, 6)).detach())


def test_both_ranks_report_a_norm_that_is_not_finite_on_one_and_scale_nothing(two_ranks):
    _, results, _ = two_ranks
    for rank in (0, 1):
        for kind in KINDS:
            norm, kept = results[rank][kind]["broken"]
            assert norm != norm
            assert kept
