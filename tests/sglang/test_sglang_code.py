"""Code that a checkpoint or a draft names: SGLang would run it without trust too, so it never sees such a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from dsl.errors import DataError
from ops.lib.data.files import read_json, write_json
from ops.lib.sglang.dflash_worker import DflashEngine
from ops.lib.sglang.runtime import SglangRuntime

SIZES = {"device": "cpu", "dtype": "float32", "pool_tokens": 256, "context_length": 100}


@pytest.fixture
def traps(tmp_path, monkeypatch) -> tuple[Callable[[Path], Path], Path]:
    """What copies a directory and names code in it, and the file that this code would make."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    canary = tmp_path / "canary"

    def trapped(directory: Path) -> Path:
        copy = shutil.copytree(directory, tmp_path / "trapped")
        (copy / "own_code.py").write_text(f"from pathlib import Path\nPath({str(canary)!r}).touch()\n")
        names = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "own_code.Own")
        unknown = {"architectures": ["OwnForCausalLM"], "auto_map": names}
        write_json(copy / "config.json", read_json(copy / "config.json") | unknown)
        return copy

    return trapped, canary


def test_a_target_whose_code_is_not_trusted_does_not_run_it_in_sglang(text_case, traps):
    trapped, canary = traps
    with pytest.raises(DataError, match="only runs with trust_remote_code = true"):
        SglangRuntime.start(trapped(text_case.target.path / "model"), **SIZES)
    assert not canary.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_a_draft_runs_no_code_in_sglang_whatever_its_target_may(text_case, traps, trust):
    trapped, canary = traps
    model, draft = text_case.target.path / "model", next(iter(text_case.drafts.values())).path
    with pytest.raises(DataError, match="auto_map names code"):
        DflashEngine.start(model, trapped(draft), server_args={"trust_remote_code": trust}, **SIZES)
    assert not canary.exists()
