"""The cost model beside machines that are simulated event by event, whose figures are written here by hand."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve, frozen
from cost_cases import LENGTH, SAMPLES, TARGETS, works, written
from simulated_machines import Machines as Simulated
from simulated_machines import stored_capture, stored_training, streamed_training

from dsl.estimate import CaptureWork, TrainingWork
from executor.cost import constants, model, rates
from executor.cost.constants import GPUS, Constant, Machines
from executor.cost.model import Cost, Model
from executor.cost.rates import Measured

GPU = "h200"
WITHIN = 0.15
SHARD = 262_144  # tokens
# GPUs: shards of a GPU, steps on stored and on streamed features: enough for a lost minute and the start to be little.
SIZES = {1: (100, 8, 8), 2: (100, 8, 20), 8: (50, 8, 30), 32: (15, 8, 40), 128: (6, 8, 40), 1000: (2, 6, 40)}
# tokens/s of capture and of training, bytes a token, bytes of an update: 5 layers of 4096, or 2048, in bfloat16 and 5
# bytes; 6 bytes for each of 1.05 and of 0.304 billion weights.
FIGURES = {"dense": (26_700, 11_600, 40_965, 6.29e9), "sparse": (35_900, 29_700, 20_485, 1.83e9)}


@frozen
class Rate:
    """Tokens/s of stored capture, of the training on it, and of a training with streamed capture."""

    capture: float
    train: float
    streamed: float


@cache
def work(target: str, folder: Path) -> tuple[CaptureWork, TrainingWork]:
    return works(written(folder, target))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cost")


def modelled(folder: Path, target: str, gpus: int) -> Cost:
    capture, training = work(target, folder)
    return model_of(capture, training).cost(gpus)


def model_of(capture: CaptureWork, training: TrainingWork) -> Model:
    assert capture.tokens is not None and training.tokens is not None
    return Model(
        training=training,
        capture=capture,
        captured=capture.tokens,
        tokens=training.tokens,
        machines=Machines(gpu=GPUS[GPU], wire=constants.WIRE.value, stream=constants.STREAM.value),
        rates=rates.rates(training, capture, GPUS[GPU], Measured()),
    )


def rate_of(cost: Cost, captured: int) -> Rate:
    return Rate(
        captured / cost.stored.capture.hours / 3600,
        cost.tokens / cost.stored.train.hours / 3600,
        cost.tokens / cost.streamed.hours / 3600,
    )


def machines(target: str, gpus: int) -> Simulated:
    capture, train, token_bytes, update = FIGURES[target]
    return Simulated(
        gpus=gpus,
        capture=capture,
        train=train,
        token_bytes=token_bytes,
        disk=5e9 if gpus <= 8 else 20e9,
        wire=12.5e9,
        process=1.5e9,
        update=update,
    )


@cache
def simulated(target: str, gpus: int, workers: int) -> Rate:
    shards, stored, streamed = SIZES[gpus]
    step, on = [LENGTH] * SAMPLES, machines(target, gpus)
    return Rate(
        shards * gpus * SHARD / stored_capture(on, shards * gpus, SHARD),
        stored * sum(step) / stored_training(on, [step] * stored),
        streamed * sum(step) / streamed_training(on, [step] * streamed, workers),
    )


def errors(folder: Path, target: str, gpus: int, workers: int) -> dict[str, float]:
    """The relative error of each modelled rate."""
    cost = modelled(folder, target, gpus)
    found, expected = rate_of(cost, work(target, folder)[0].tokens or 0), simulated(target, gpus, workers)
    names = ("capture", "train", "streamed")
    return {f"{target}, {gpus} GPUs, {name}": getattr(found, name) / getattr(expected, name) - 1 for name in names}


def test_the_model_is_within_15_percent_of_the_simulation_from_1_to_1000_gpus(folder: Path) -> None:
    found: dict[str, float] = {}
    for target in TARGETS:
        for gpus in SIZES:
            found |= errors(folder, target, gpus, modelled(folder, target, gpus).streamed.workers)
    assert 36 == len(found)
    assert {} == {name: error for name, error in found.items() if abs(error) > WITHIN}


SEEDED = {
    "GPUS": (1, constants),
    "CAPTURE_DENSE": (1, rates),
    "CAPTURE_SPARSE": (1, rates),
    "TRAINING": (1, rates),
    "LOCAL_DISK": (8, constants),
    "SHARED_DISK": (32, constants),
    "WIRE": (32, constants),
    "STREAM": (8, constants),
    "SUPPLY": (8, model),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_constant_that_is_ten_times_too_slow_is_noticed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, module = SEEDED[name]
    target = "sparse" if "SPARSE" in name else "dense"
    workers = modelled(folder, target, gpus).streamed.workers
    right = errors(folder, target, gpus, workers)
    if name == "GPUS":
        flops = GPUS[GPU].flops
        assert flops is not None
        monkeypatch.setitem(GPUS, GPU, evolve(GPUS[GPU], flops=flops / 10))
    else:
        factor = 10 if name == "SUPPLY" else 0.1
        monkeypatch.setattr(module, name, Constant(factor * getattr(module, name).value, "seeded"))
    wrong = errors(folder, target, gpus, workers)
    assert [] == [key for key, error in right.items() if abs(error) > WITHIN]
    assert [] != [key for key, error in wrong.items() if abs(error) > WITHIN]


@pytest.mark.parametrize("gpus", [8, 128])
def test_samples_of_many_lengths_are_as_near(gpus: int, folder: Path) -> None:
    capture, training = work("dense", folder)
    mean, draw = 2 * LENGTH // 3, random.Random(1)
    varied = evolve(training, sample_tokens=mean, sample_flops=training.sample_flops * mean / LENGTH)
    cost = model_of(capture, varied).cost(gpus)
    steps = [[draw.randint(LENGTH // 3, LENGTH) for _ in range(SAMPLES * LENGTH // mean)] for _ in range(40)]
    tokens, on = sum(map(sum, steps)), machines("dense", gpus)
    found = rate_of(cost, capture.tokens or 0)
    assert found.train == pytest.approx(tokens / stored_training(on, steps), rel=WITHIN)
    assert found.streamed == pytest.approx(tokens / streamed_training(on, steps, cost.streamed.workers), rel=WITHIN)


def test_no_other_number_of_workers_is_much_faster(folder: Path) -> None:
    steps, on = [[LENGTH] * SAMPLES] * 20, machines("dense", 32)
    workers = modelled(folder, "dense", 32).streamed.workers
    took = {count: streamed_training(on, steps, workers + count) for count in (-6, -2, 0, 2, 6)}
    assert took[0] < 1.05 * min(took.values())
    assert min(took[-6], took[6]) > 1.1 * took[0]
