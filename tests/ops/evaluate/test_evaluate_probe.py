"""What load_target measured of a target decides whether a draft is evaluated with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from any_targets import any_checkpoint
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import TargetModel
from ops.evaluate.conflicts import conflicts
from ops.evaluate.op import Evaluate
from ops.lib.data.files import read_json, write_json
from ops.lib.forecasts import TargetStated
from ops.lib.target.probed import BLOCKS, LAYERS, MEASURED, SPECULATION, Check, Probe
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.train_dflash.conflicts import conflicts as of_training
from ops.train_dflash.op import TrainDflash


def loaded(kind: str, folder: Path) -> Path:
    stage = FakeStage(folder / "stage")
    load_target(LoadTarget(checkpoint=str(any_checkpoint(kind, folder / "checkpoint"))), stage)
    return stage.artifact(TargetModel).path


def found(target: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The conflicts of an evaluation, and of a training that measures tau."""
    stated = TargetStated.read(target, "digest")
    edges = {"target": Ref("t"), "tokens": Ref("k")}
    training = TrainDflash(features=Ref("f"), batches=Ref("b"), block_size=4, num_layers=1, eval_every=5, **edges)
    given = {"draft": None, "target": stated, "tokens": None}
    return conflicts(Evaluate(draft=Ref("d"), **edges), given), of_training(training, {"target": stated})


def write_probes(target: Path, *probes: Probe) -> None:
    write_json(target / MEASURED, {"probes": [probe.to_json() for probe in probes]})


BAD = (
    Check(LAYERS, True, 0.0),
    Check(BLOCKS, False, 0.5),
    Check(SPECULATION, False, reason="1 of 2 answers are others"),
)
GOOD = tuple(Check(check.name, True, 0.0) for check in BAD)


def test_a_target_that_cannot_verify_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    target = loaded("llama", tmp_path)
    assert ["a small random copy", "the weights"] == [each["on"] for each in read_json(target / MEASURED)["probes"]]
    assert ({}, {}) == found(target)
    write_probes(target, Probe("a copy", GOOD, 0.1), Probe("the weights", BAD, 0.1))
    of_evaluation, of_tau = found(target)
    assert of_evaluation["target"].startswith("measured on the weights: it does not hold that blocks through its cache")
    assert "1 of 2 answers are others" in of_evaluation["target"]
    assert f"{of_evaluation['target']}; with eval_prompts = 0 the training does not decode" == of_tau["target"]


def test_the_weights_decide_if_they_are_measured(tmp_path: Path) -> None:
    target = loaded("llama", tmp_path)
    write_probes(target, Probe("a copy", BAD, 0.1), Probe("the weights", GOOD, 0.1))
    assert ({}, {}) == found(target)
    write_probes(target, Probe("a copy", BAD, 0.1))
    assert "measured on a copy" in found(target)[0]["target"]


@pytest.mark.parametrize("measured", [{"seconds": 3.0}, None])
def test_what_was_not_measured_refuses_nothing(tmp_path: Path, measured: dict[str, float] | None) -> None:
    target = loaded("llama", tmp_path)
    (target / MEASURED).unlink()
    if measured is not None:
        write_json(target / MEASURED, measured)
    assert ({}, {}) == found(target)


def test_qwens_families_are_warned_of_only(tmp_path: Path) -> None:
    target = loaded("qwen3", tmp_path)
    write_probes(target, Probe("the weights", BAD, 0.1))
    assert ({}, {}) == found(target)
