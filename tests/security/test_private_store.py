"""Whom a store lets in: nobody else, unless its user made the folder for others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from imitated_runs import run, toy_pipeline
from toy_ops import ONE_NODE, Toy

from executor.store.artifact_store import Store

OPEN_TO_ALL = 0o022


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(OPEN_TO_ALL)
    yield
    os.umask(before)


def reachable_by_others(folder: Path) -> list[Path]:
    """The paths below a folder that another user can open, if that user can enter the folder.

    A folder without x keeps others from everything below it.
    """
    found = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if mode & (stat.S_IROTH | stat.S_IRGRP):
            found.append(path)
        if path.is_dir() and mode & (stat.S_IXOTH | stat.S_IXGRP):
            found += reachable_by_others(path)
    return found


def test_no_file_of_a_new_store_is_open_to_others(tmp_path):
    (tmp_path / "toy").mkdir()
    toy = Toy(tmp_path / "toy", ONE_NODE)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    assert list(toy.store.glob("records/*/*.log"))
    assert not set(toy.store.rglob("*")) & set(reachable_by_others(tmp_path))
    assert 0o700 == stat.S_IMODE(toy.store.stat().st_mode)


@pytest.mark.parametrize("mode", [0o755, 0o2770])
def test_a_folder_that_the_user_made_keeps_its_mode(mode, tmp_path):
    store = tmp_path / "shared"
    store.mkdir()
    store.chmod(mode)
    toy = toy_pipeline(tmp_path / "toy")
    toy.store.symlink_to(store)
    run(toy)
    assert mode == stat.S_IMODE(store.stat().st_mode)


def test_the_folder_that_comes_with_a_clone_is_made_private_once(tmp_path):
    store = tmp_path / "runs"
    store.mkdir()
    (store / "README.md").touch()
    Store.open(store, write=True)
    assert 0o700 == stat.S_IMODE(store.stat().st_mode)
    store.chmod(0o750)
    Store.open(store, write=True)
    assert 0o750 == stat.S_IMODE(store.stat().st_mode)


def test_folders_above_a_store_are_as_the_users_other_folders(tmp_path):
    Store.open(tmp_path / "a" / "runs", write=True)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/runs")]
    assert [0o755, 0o700] == modes
