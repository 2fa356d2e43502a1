"""What torch has compiled and unpickles again lies where only this user can put it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from side_ops import side

from dsl.errors import ServerError
from executor.launchers.host_run import stage_environment
from executor.model_tools.engines import ENGINES
from executor.model_tools.serve import EngineServer
from executor.system import user_cache
from executor.system.user_cache import COMPILED


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """Forget the compile cache's folder, with no folder chosen by the user and a home of the test's own."""
    user_cache._compiled_folder.cache_clear()
    for name in (COMPILED, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    user_cache._compiled_folder.cache_clear()


def test_it_is_in_the_users_cache_folder_and_closed_to_others(tmp_path, monkeypatch):
    folder = Path(stage_environment(1)[COMPILED])
    assert tmp_path / "home" / ".cache" / "dflow" / "compiled" == folder
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert 0 == folder.parent.stat().st_mode & stat.S_IWOTH
    user_cache._compiled_folder.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert str(tmp_path / "caches" / "dflow" / "compiled") == stage_environment(1)[COMPILED]


def test_the_users_own_choice_counts(monkeypatch):
    monkeypatch.setenv(COMPILED, "/fast/disk")
    assert "/fast/disk" == stage_environment(1)[COMPILED]


def test_without_a_home_it_is_a_new_folder_of_no_name_that_others_could_foresee(tmp_path):
    (tmp_path / "home").write_text("no folder")
    folder = Path(stage_environment(1)[COMPILED])
    assert tmp_path == folder.parent
    assert (0o700, os.getuid()) == (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid)
    assert str(folder) == stage_environment(1)[COMPILED]
    user_cache._compiled_folder.cache_clear()
    assert str(folder) != stage_environment(1)[COMPILED]


def test_a_stage_and_a_server_find_it(tmp_path):
    toy = side(tmp_path, '[node.a]\nop = "look"\n')
    result = toy.dflow("run", str(toy.file))
    assert 0 == result.returncode, result.stderr
    expected = str(tmp_path / "home" / ".cache" / "dflow" / "compiled")
    assert expected == json.loads(toy.text("a"))["compiled"]
    server = EngineServer(ENGINES["sglang"], ["printenv", COMPILED], {}, tmp_path / "log")
    with server, pytest.raises(ServerError):
        server.wait()
    assert [expected] == (tmp_path / "log").read_text().split()
