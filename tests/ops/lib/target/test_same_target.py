"""A target that was loaded with another mask token is the same target, though its artifact has another digest."""

from __future__ import annotations

import shutil
from pathlib import Path

from draft_chain import tiny_config
from serve_cases import commit

from executor.store.artifact_store import Store
from ops.artifacts import Draft, DraftCheckpoint, TargetModel
from ops.lib.data.files import read_json, write_json
from ops.lib.forecasts import DraftForecast, TargetStated, of_another_target
from ops.lib.target.same_target import is_same_target
from ops.tools.diagnose.export import target_finding


def stored(store: Store, target: TargetModel, folder: Path, **changed: object) -> TargetModel:
    """A copy in the store, with other values in target.json."""
    shutil.copytree(target.path, folder)
    write_json(folder / "target.json", read_json(folder / "target.json") | changed)
    digest = commit(store, folder.name, folder.name, folder)
    return TargetModel(store.object_path(digest), digest)


def test_the_mask_token_makes_no_other_target(target: TargetModel, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "runs", write=True)
    one, other = (stored(store, target, tmp_path / f"mask-{mask}", mask_token_id=mask) for mask in (7, 11))
    foreign = stored(store, target, tmp_path / "foreign", mask_token_id=7, eos_token_ids=[3])
    assert 3 == len({one.digest, other.digest, foreign.digest})
    assert is_same_target(one.digest, other.digest, other.path)
    assert is_same_target(other.digest, one.digest, one.path)
    assert not is_same_target(foreign.digest, other.digest, other.path)
    assert not is_same_target(one.digest, other.digest, None)
    assert not is_same_target(one.digest, "elsewhere", target.path)  # of no store
    write_json(tmp_path / "training.json", {"target": one.digest})
    training, draft = DraftCheckpoint(tmp_path, "training"), Draft(tmp_path, "draft")
    levels = [target_finding(draft, training, each).level for each in (one, other, foreign)]
    assert ["good", "good", "error"] == levels


def test_a_plan_takes_a_draft_for_the_target_that_it_was_trained_for_with_another_mask_token(
    target: TargetModel, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "runs", write=True)
    one, other = (stored(store, target, tmp_path / f"mask-{mask}", mask_token_id=mask) for mask in (7, 11))
    foreign = stored(store, target, tmp_path / "foreign", mask_token_id=7, eos_token_ids=[3])
    draft = DraftForecast(shape=tiny_config(), target=one.digest)
    assert ["", ""] == [of_another_target(draft, TargetStated.read(each.path, each.digest)) for each in (one, other)]
    said = of_another_target(draft, TargetStated.read(foreign.path, foreign.digest))
    assert f"this draft was trained for the target {one.digest[:12]}, but the node's target is " in said


def test_all_ids_of_a_vocabulary_are_tried(target: TargetModel, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "runs", write=True)
    large = {"vocab_size": 150_000}
    one, other = (stored(store, target, tmp_path / f"{mask}", mask_token_id=mask, **large) for mask in (0, 149_999))
    assert is_same_target(one.digest, other.digest, other.path)
    assert is_same_target(other.digest, one.digest, one.path)
