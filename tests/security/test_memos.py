"""What dflow remembers lies where only its user can write: nothing in a store tells it that a file is what it was."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import attrs
import pytest
from toy_ops import ONE_NODE, Toy

from executor.store.artifact_store import Store
from executor.store.integrity import MEMO
from executor.system.stamps import Stamp
from executor.system.user_cache import user_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_store_that_says_of_its_files_that_they_were_read_is_not_believed(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    digest = toy.state()["nodes"]["a"]["digest"]
    file = toy.store / "objects" / digest / "text.txt"
    file.chmod(0o644)
    file.write_text("jello")
    line = {"digest": digest, "name": "text.txt", **attrs.asdict(Stamp.of(file))}
    (toy.store / MEMO).write_text(json.dumps(line) + "\n")
    verified = toy.dflow("verify")
    assert (1, True) == (verified.returncode, f"{digest[:12]}: text.txt" in verified.stderr)


def test_the_users_cache_is_his_alone(home):
    folder = user_cache("stores", "0")
    assert home / ".cache" / "dflow" / "stores" / "0" == folder
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE((home / ".cache" / "dflow").stat().st_mode)


@pytest.mark.parametrize("open_to_all", [".cache/dflow", ".cache/dflow/stores"])
def test_a_cache_that_others_may_write_to_is_none(home, open_to_all):
    folder = home / open_to_all
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert user_cache("stores") is None


def test_a_plan_leaves_its_memos_and_no_store(tmp_path, home):
    store = Store.open(tmp_path / "runs", write=False)
    assert store.external_memo.parent.is_dir()
    assert not (tmp_path / "runs").exists()
    (home / ".cache" / "dflow").chmod(0o777)
    assert Store.open(tmp_path / "runs", write=False).external_memo is None
