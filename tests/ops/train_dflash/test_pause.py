"""A training that pauses and is continued by another node: nothing differs from a training without a pause."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from draft_chain import make_inputs, train_config
from fake_stage import FakeStage, folder_digest

from dsl.errors import ConfigError, DataError
from dsl.op import Ref
from ops.artifacts import DraftCheckpoint
from ops.lib.data.files import read_json
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

STEPS = 8
OPTIONS: dict[str, Any] = {"max_steps": STEPS, "lr": 1e-2, "checkpoint_every": 3, "keep_checkpoints": 1}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def trained(folder: Path, inputs: dict[str, Any], **changes: Any) -> FakeStage:
    stage = FakeStage(folder, inputs)
    train_dflash(train_config(**OPTIONS, **changes), stage)
    return stage


def continued(folder: Path, inputs: dict[str, Any], earlier: FakeStage, **changes: Any) -> FakeStage:
    from_ = {"continues": earlier.artifact(DraftCheckpoint)}
    return trained(folder, inputs | from_, continues=Ref("earlier"), **changes)


@pytest.mark.parametrize(
    "options",
    [
        {"select": "loss", "eval_every": 2},  # measured at one of the pauses, not at the other
        {"schedule": "wsd", "ema_decay": 0.9, "optimizer": "muon"},
    ],
    ids=["select", "average"],
)
def test_a_training_with_pauses_gives_the_bytes_of_one_without(
    inputs: dict[str, Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    whole = trained(tmp_path / "whole", inputs, **options)
    first = trained(tmp_path / "first", inputs, pause_after=3, **options)
    second = continued(tmp_path / "second", inputs, first, pause_after=6, **options)
    last = continued(tmp_path / "last", inputs, second, **options)
    assert [(3, 6), (6, STEPS)] == [second.progressed[0], last.progressed[0]]
    assert [3, 6] == [read_json(stage.out_dir / "training.json")["steps"] for stage in (first, second)]
    assert folder_digest(whole.out_dir) == folder_digest(last.out_dir)


def test_a_training_that_pauses_at_its_end_leaves_nothing_to_train_or_measure(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", inputs, eval_every=2)
    paused = trained(tmp_path / "paused", inputs, eval_every=2, pause_after=STEPS)
    last = continued(tmp_path / "last", inputs, paused, eval_every=2)
    assert [] == last.logged
    assert folder_digest(whole.out_dir) == folder_digest(last.out_dir)


def test_a_paused_training_that_starts_again_at_its_pause_gives_the_same_artifact(
    inputs: dict[str, Any], tmp_path: Path
) -> None:
    once = trained(tmp_path / "once", inputs, pause_after=5)
    digest = folder_digest(once.out_dir)
    shutil.rmtree(once.out_dir)
    again = trained(tmp_path / "once", inputs, pause_after=5)
    assert (5, 5) == again.progressed[0]
    assert digest == folder_digest(again.out_dir)


def test_a_pause_behind_the_end_and_another_training_are_refused(inputs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="9 is more than the 8 steps of the training: lower it"):
        trained(tmp_path / "late", inputs, pause_after=9)
    whole = trained(tmp_path / "whole", inputs)
    with pytest.raises(DataError, match="kept no state to go on from; give it pause_after"):
        continued(tmp_path / "without", inputs, whole)
    paused = trained(tmp_path / "paused", inputs, pause_after=3)
    with pytest.raises(ConfigError, match=r"config\.lr: 0\.01 then, 0\.02 now"):
        stage = FakeStage(tmp_path / "other", inputs | {"continues": paused.artifact(DraftCheckpoint)})
        train_dflash(evolve(train_config(**OPTIONS), continues=Ref("earlier"), lr=0.02), stage)


def test_a_plan_names_every_field_in_which_the_continued_training_differs() -> None:
    own = {"lr": 0.1, "num_layers": 2, "pause_after": 4, "log_every": 1}
    earlier = {"lr": 0.2, "num_layers": 2, "pause_after": 6, "log_every": 5}
    assert {
        "lr": "0.1, but 0.2 in the training that this one continues: give both the same",
        "pause_after": "4, but the training that this one continues has 6 steps already",
    } == TrainDflash.mistakes_with_nodes_above(own, lambda edge: earlier if edge == "continues" else {})
    wrong = TrainDflash.mistakes_with_nodes_above(own, lambda _: earlier | {"pause_after": None})
    assert ["continues"] == list(wrong)
    assert {} == TrainDflash.mistakes_with_nodes_above(own, lambda _: {})
