"""The command that serves a target with a draft in vLLM, and the version that it is written for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsl.errors import DataError
from ops.lib.sglang.serve_command import Address, DraftOption, Served
from ops.lib.vllm import version
from ops.lib.vllm.serve_command import (
    BY_TRANSFORMERS,
    REFUSED,
    draft_for_vllm,
    environment,
    launch_command,
    warnings_for_vllm,
)
from ops.lib.vllm.version import VLLM_VERSION, require_vllm

PYTHON = sys.executable
TABLE = Path(__file__).resolve().parents[3] / "docs" / "targets.md"
DRAFT = DraftOption(path="draft", block_size=8)
SPECULATIVE = [
    *("--speculative-config", '{"method": "dflash", "model": "draft", "num_speculative_tokens": 7}'),
    *("--per-request-spec-decode-metrics", "summary"),
]
AT = ["--host", "127.0.0.1", "--port", "8000"]


def served(model_type: str, **changed: object) -> Served:
    return Served(**{"model_type": model_type, "vision": False, "dtype": "bfloat16", **changed})  # type: ignore[arg-type]


def test_vllm_is_told_one_token_fewer_than_a_block_has_slots():
    expected = ["vllm", "serve", "target", "--dtype", "bfloat16", *SPECULATIVE, *AT]
    assert expected == launch_command("target", served("qwen3"), DRAFT)


def test_without_a_draft_the_target_is_served_alone():
    assert ["vllm", "serve", "target", "--dtype", "bfloat16", *AT] == launch_command("target", served("qwen3"), None)


@pytest.mark.parametrize("model_type", sorted(BY_TRANSFORMERS))
def test_a_draft_of_such_a_target_is_served_with_transformers_model(model_type: str):
    command = launch_command("target", served(model_type), DRAFT)
    assert "transformers" == command[command.index("--model-impl") + 1]
    assert "--model-impl" not in launch_command("target", served(model_type), None)


@pytest.mark.parametrize(("backend", "is_fast"), [("pillow", False), ("torchvision", True)])
def test_images_are_prepared_as_for_the_training(backend: str, is_fast: bool):
    pixels = {"min_pixels": 64, "max_pixels": 1024}
    for limits in ({}, pixels):
        command = launch_command("target", served("qwen3_vl", vision=True, image_backend=backend, pixels=limits), DRAFT)
        assert {"use_fast": is_fast, **limits} == json.loads(command[command.index("--mm-processor-kwargs") + 1])


def test_a_target_with_images_gets_the_model_runner_that_counts_the_drafts_positions_as_the_training_did():
    assert {"VLLM_USE_V2_MODEL_RUNNER": "1"} == environment(served("qwen3_vl", vision=True))
    assert {} == environment(served("qwen3"))


def test_code_of_the_target_is_run_only_where_it_was_trusted():
    assert "--trust-remote-code" not in launch_command("target", served("qwen3"), DRAFT)
    assert "--trust-remote-code" in launch_command("target", served("qwen3", trust_remote_code=True), DRAFT)


def test_sglangs_number_formats_are_not_passed_on_but_warned_of():
    captured = served("qwen3", server_args={"quantization": "fp8", "page_size": 16})
    assert launch_command("target", served("qwen3"), DRAFT) == launch_command("target", captured, DRAFT)
    (warning,) = warnings_for_vllm(captured)
    assert "captured by SGLang with --quantization fp8" in warning
    assert [] == warnings_for_vllm(served("qwen3"))


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_a_target_that_the_table_of_vllm_says_it_refuses_is_warned_of(model_type: str):
    (warning,) = warnings_for_vllm(served(model_type))
    assert f"vLLM serves no draft for a target of the type {model_type}" in warning
    [row] = [line for line in TABLE.read_text().splitlines() if f"| `{model_type}` | none" in line]
    assert row.endswith("| refused, by its source |")


def test_further_arguments_come_last_and_so_win():
    address = Address(host="0.0.0.0", port=9000)
    command = launch_command("target", served("qwen3"), DRAFT, address=address, extra=["--dtype", "float16"])
    assert ["--host", "0.0.0.0", "--port", "9000", "--dtype", "float16"] == command[-6:]


def test_the_folder_of_speculators_format_is_served_where_there_is_one(tmp_path):
    assert tmp_path == draft_for_vllm(tmp_path)
    (tmp_path / "speculators").mkdir()
    assert tmp_path / "speculators" == draft_for_vllm(tmp_path)


def program(folder: Path, first: str) -> Path:
    file = folder / "vllm"
    file.write_text(f"{first}\n")
    file.chmod(0o755)
    return file


def python_with(folder: Path, found: str | None) -> Path:
    """A Python for whose packages vLLM has this version."""
    metadata = folder / "site" / f"vllm-{found}.dist-info" / "METADATA"
    if found is not None:
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {PYTHON} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """The only folder on PATH; nothing lies beside this Python."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(version.sys, "executable", str(tmp_path / "elsewhere" / "python"))
    return tmp_path


def test_the_program_of_another_environment_is_found_on_path(path):
    assert program(path, f"#!{python_with(path, VLLM_VERSION)}") == require_vllm("this")


def test_a_program_that_a_long_path_made_a_shell_script_is_asked_by_the_python_beside_it(path):
    python_with(path, VLLM_VERSION).rename(path / "python3")
    assert program(path, "#!/bin/sh") == require_vllm("this")


@pytest.mark.parametrize(
    ("found", "message"),
    [("0.32.0", "is written for vLLM 0.33.0, and .*/vllm is of 0.32.0: pip install"), (None, "of an unknown version")],
)
def test_another_version_is_refused(path, found, message):
    program(path, f"#!{python_with(path, found)}")
    with pytest.raises(DataError, match=message):
        require_vllm("this")


def test_a_program_that_is_no_script_is_of_an_unknown_version(path):
    program(path, "\x7fELF")
    with pytest.raises(DataError, match="of an unknown version"):
        require_vllm("this")


def test_without_vllm_the_message_says_where_to_install_it(path):
    with pytest.raises(DataError, match="neither beside this Python nor on PATH: pip install vllm"):
        require_vllm("this")
