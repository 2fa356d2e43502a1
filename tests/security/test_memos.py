"""What dflow remembers lies where only its user can write: nothing in a store tells it that a file is what it was."""

from __future__ import annotations

import json
import re
import shutil
import stat
import time
from pathlib import Path

import attrs
import pytest
from toy_ops import ONE_NODE, Toy

from executor.store.artifact_store import Store
from executor.store.integrity import VERIFIED
from executor.system.stamps import Stamp
from executor.system.user_cache import user_cache

SETTLED_S = 2.5  # after which a file that was just written is remembered


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
    (toy.store / VERIFIED).write_text(json.dumps(line) + "\n")
    verified = toy.dflow("doctor", "--verify")
    assert (1, True) == (verified.returncode, f"{digest[:12]}: text.txt" in verified.stderr)


def test_verify_says_how_many_files_it_did_not_read_again(tmp_path, home):
    toy = Toy(tmp_path, ONE_NODE)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    time.sleep(SETTLED_S)
    first, second, full = (toy.dflow("doctor", "--verify", *options).stdout for options in ((), (), ("--full",)))
    assert "1 artifact is unchanged (by content)\n" == first == full
    assert re.fullmatch(
        r"1 artifact is unchanged \(by content; \d files? not read again, .*: --full reads all\)\n", second
    )


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
    toy = Toy(tmp_path, ONE_NODE)
    time.sleep(SETTLED_S)
    assert 0 == toy.dflow("plan", str(toy.file)).returncode
    memos = Store.open(toy.store, write=False).memos
    assert home in memos.parents
    assert (memos / "modules.jsonl").is_file()
    assert not toy.store.exists()
    (home / ".cache" / "dflow").chmod(0o777)
    assert Store.open(toy.store, write=False).external_memo is None


@pytest.mark.parametrize(("forged_in", "calls"), [("store", ["make"]), ("user's cache", [])])
@pytest.mark.parametrize("changed", ["toy.py", "text"])
def test_memos_in_a_store_are_not_believed_though_they_would_be_in_the_users_cache(tmp_path, changed, forged_in, calls):
    toy = Toy(tmp_path, ONE_NODE.replace('text = "hello"', 'source = "text"'))
    (tmp_path / "text").write_text("hello")
    time.sleep(SETTLED_S)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    memos, file = Store.open(toy.store, write=True).memos, tmp_path / changed
    code, external = (json.loads((memos / name).read_text()) for name in ("modules.jsonl", "external.jsonl"))
    shutil.rmtree(memos)
    file.write_text(file.read_text().replace("hello", "jello").replace('count_call("make")', 'count_call("make"); 1'))
    if changed == "toy.py":
        code["state"][:4] = attrs.astuple(Stamp.of(file))
    else:
        external |= attrs.asdict(Stamp.of(file))
    folder = toy.store if forged_in == "store" else Store.open(toy.store, write=True).memos
    (folder / "modules.jsonl").write_text(json.dumps(code) + "\n")
    (folder / "external.jsonl").write_text(json.dumps(external) + "\n")
    toy.calls()
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    assert calls == toy.calls()
