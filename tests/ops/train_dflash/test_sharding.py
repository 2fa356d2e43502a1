"""The sharded draft on two gloo ranks: the gradients of one process, and what is gathered and reduced when, in which
dtype.
"""

import multiprocessing
import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draft_chain import make_inputs, train_config
from fake_stage import FakeStage
from meeting import meeting
from op_counts import Recorded, casts_of
from parity_cases import write_plan

from ops.lib.drafts.dflash2.config import Dflash2Options
from ops.lib.drafts.dspark.config import DsparkOptions
from ops.lib.drafts.lilicorr.config import LilicorrOptions
from ops.lib.training.dtensors import gathered, local
from ops.lib.training.optimizer import clip_gradients, make_optimizer, named_state, set_rate
from ops.train_dflash import sharding
from ops.train_dflash.engine import set_up
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.step import measure, train_step
from ops.train_dflash.tally import mean_loss

LAYERS, STEPS = 3, 2
SHAPE = {"num_layers": LAYERS, "micro_batch_tokens": 30, "anchor_chunk": 4, "lr": 1e-3}
ONE_UNIT, COMPILED = "one unit", "compiled"
CASES = {
    ONE_UNIT: {"dtype": "float64"},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16"},
    "one pass": {"dtype": "bfloat16", "micro_batch_tokens": 10_000, "anchor_chunk": 512},
    "checkpointed": {"dtype": "float64", "activation_checkpointing": True},
    COMPILED: {"dtype": "float64", "compile": True, "num_layers": 2},
}
ALGORITHMS = {
    "DFlash2": {"algorithm": "dflash2", "dflash2": Dflash2Options(rank=4, candidates=4)},
    "DSpark": {"algorithm": "dspark", "dspark": DsparkOptions(rank=4, l1=0.0, confidence_head=False, base=1.0)},
    "LiLiCorr": {
        "algorithm": "lilicorr",
        "lilicorr": LilicorrOptions(candidates=4, width=8, heads=2, factors=4, regret=0.0),
    },
}
ALGORITHMS |= {f"{name} in bfloat16": {**changes, "dtype": "bfloat16"} for name, changes in ALGORITHMS.items()}
IN_PARTS = [name for name in CASES if name not in (ONE_UNIT, COMPILED)]
CASES |= {name: {"dtype": "float64", **changes} for name, changes in ALGORITHMS.items()}


def take_steps(inputs, folder, changes, rank=0, world_size=1):
    """Losses, the gradients of the last step, the weights behind it, and the collectives of the last step."""
    config = train_config(**SHAPE | changes)
    stage = FakeStage(folder, inputs, rank=rank, world_size=world_size)
    opened = open_inputs(config, stage)
    setup = set_up(config, stage, opened)
    model = setup.engine.model
    optimizer = make_optimizer(model, 0.0)
    set_rate(optimizer, config.lr)
    stream = setup.train.steps(opened.steps[:STEPS], 0)
    losses, graphs = [], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(STEPS):
        optimizer.zero_grad()
        # Nothing is compiled under a mode that sees every operation.
        with Recorded() if not config.compile else nullcontext() as recorded:
            losses.append(mean_loss(train_step(setup.engine, stream, world_size)))
        gradients = {name: gathered(parameter.grad).clone() for name, parameter in model.named_parameters()}
        clip_gradients(model.parameters(), 0.5)
        optimizer.step()
    weights = {name: gathered(parameter).clone() for name, parameter in model.named_parameters()}
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": weights,
        "val": mean_loss(measure(setup.engine, setup.val, 2)),
        "collectives": collectives_of(recorded) if recorded else None,
        "casts": len(casts_of(recorded, [local(parameter) for parameter in model.parameters()])) if recorded else None,
        "state": {str(tensor.dtype) for tensor in named_state(optimizer, model).values()},
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        "masters": {str(parameter.dtype) for parameter in model.parameters()},
    }


def collectives_of(recorded):
    """(kind, dtype, elements) of every collective in order."""
    kinds = {"c10d::_allgather_base_": "gather", "c10d::_reduce_scatter_base_": "reduce"}
    return [
        (kinds[call.name], str(call.arguments[0].dtype).removeprefix("torch."), call.arguments[0].numel())
        for call in recorded.calls
        if call.name in kinds
    ]


def one_of_two(rank, folder, inputs, place):
    torch.set_num_threads(1)
    os.environ |= {**place, "RANK": str(rank)}
    dist.init_process_group("gloo")
    torch.compile = partial(torch.compile, backend="aot_eager")  # forward and backward as graphs, no kernels
    results = {}
    for name, changes in CASES.items():
        sharding.overlaps = lambda _flat, parts=name != ONE_UNIT: parts  # as on a GPU
        results[name] = take_steps(inputs, folder / "scratch", changes, rank, 2)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of one process, and of each of two ranks."""
    folder = tmp_path_factory.mktemp("sharding")
    inputs = make_inputs(folder / "inputs")
    # Of the last step one rank has a sample, in two passes, and the other an idle one.
    inputs["batches"] = write_plan(folder / "steps", inputs["features"], [range(12), [11]])
    multiprocessing.set_forkserver_preload(["ops.train_dflash.engine"])
    with meeting(2) as place:
        mp.start_processes(one_of_two, (folder, inputs, place), nprocs=2, start_method="forkserver")
    uncompiled = {"compile": False}
    alone = {name: take_steps(inputs, folder / "scratch", CASES[name] | uncompiled) for name in CASES}
    return [alone, *(torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1))]


def off(expected, got):
    """Norm of the difference over the norm, all tensors together."""
    difference = sum(float((got[name].double() - tensor.double()).norm()) ** 2 for name, tensor in expected.items())
    return (difference / sum(float(tensor.double().norm()) ** 2 for tensor in expected.values())) ** 0.5


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_gradients_and_weights_of_one_process(results, name):
    alone, *ranks = (result[name] for result in results)
    limit = 1e-12 if CASES[name]["dtype"] == "float64" else 2e-2
    assert alone["gradients"].keys() == ranks[0]["gradients"].keys()
    for rank in ranks:
        assert off(alone["gradients"], rank["gradients"]) < limit
        assert off(alone["weights"], rank["weights"]) < limit
        assert rank["losses"] == pytest.approx(alone["losses"], rel=limit)
        assert rank["val"] == pytest.approx(alone["val"], rel=limit)
    assert off(ranks[0]["weights"], ranks[1]["weights"]) == 0


def test_layers_are_compiled_in_that_case_alone(results):
    for rank in results[1:]:
        assert {COMPILED} == {name for name in CASES if rank[name]["graphs"]}


def test_one_unit_is_gathered_once_and_reduced_once(results):
    elements = sum(tensor.numel() for tensor in results[0][ONE_UNIT]["weights"].values())
    for rank in results[1:]:
        assert [("gather", "float64", elements), ("reduce", "float64", elements / 2)] == rank[ONE_UNIT]["collectives"]


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_step_gathers_every_weight_once_and_reduces_what_the_context_needs_in_a_second_round(results, name):
    """In bfloat16 the gathers, in float32 the reductions; the same on both ranks, whose passes differ in number."""
    narrow = CASES[name]["dtype"] == "bfloat16"
    alone, *ranks = (result[name] for result in results)
    elements = {part: tensor.numel() for part, tensor in alone["weights"].items()}
    total = sum(elements.values())
    again = sum(size for part, size in elements.items() if "k_proj" in part or "v_proj" in part or "k_norm" in part)
    assert ranks[0]["collectives"] == ranks[1]["collectives"]
    for kind, dtype, expected in (
        ("gather", "bfloat16" if narrow else "float64", total),
        ("reduce", "float32" if narrow else "float64", (total + again) / 2),
    ):
        found = [collective for collective in ranks[0]["collectives"] if collective[0] == kind]
        assert {dtype} == {collective[1] for collective in found}
        assert expected == sum(collective[2] for collective in found)
    kinds = [collective[0] for collective in ranks[0]["collectives"]]
    assert ["gather"] * (2 * LAYERS + 2) == kinds[: 2 * LAYERS + 2]
    assert {"reduce"} == set(kinds[2 * LAYERS + 2 :])


def test_masters_and_moments_stay_wide_and_no_weight_is_cast_at_its_use(results):
    for result in results[1:]:
        assert {"torch.float32"} == result["bfloat16"]["masters"] == result["bfloat16"]["state"]
        assert {"torch.float64"} == result["float64"]["masters"]
        # Every part is cast once for its gather.
        assert result["bfloat16"]["casts"] <= len(result["bfloat16"]["weights"])


def test_layers_are_reduced_last_to_first_while_the_pass_goes_on_and_attentions_behind_it(results):
    """Layer 0, whose input needs no gradient, is among those behind the pass."""
    weights, collectives = results[1]["float64"]["weights"], results[1]["float64"]["collectives"]
    half = {
        "layer": sum(x.numel() for part, x in weights.items() if part.startswith("layers.0.") and "attn" not in part)
        / 2,
        "attention": sum(x.numel() for part, x in weights.items() if part.startswith("layers.0.self_attn")) / 2,
        "norm": weights["norm.weight"].numel() / 2,
        "root": (weights["fc.weight"].numel() + weights["hidden_norm.weight"].numel()) / 2,
    }
    reduced = [collective[2] for collective in collectives if collective[0] == "reduce"]
    assert [half["norm"], *[half["layer"]] * (LAYERS - 1)] == reduced[:LAYERS]
    assert [half["layer"], *[half["attention"]] * LAYERS] == sorted(reduced[LAYERS : 2 * LAYERS + 1], reverse=True)
    assert half["root"] in reduced[2 * LAYERS + 1 :]
