"""`dflow serve`: what it finds in a run, what it says, and that its server never outlives it.

The server of these tests is a small HTTP server under SGLang's name; tests/sglang holds those with SGLang itself.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from chat_server import ChatServer, response
from own_algorithm import known_slot_bias
from ports import free_port
from serve_cases import (
    CHECK,
    SECOND,
    install_server,
    install_vllm,
    later_partial_run,
    make_artifacts,
    record_run,
    write_folder,
)

from dsl.errors import ConfigError, DataError, ServerError, StoreError
from dsl.finding import Finding
from executor.cli import main
from executor.model_tools.engines import ENGINES
from executor.model_tools.serve import EngineServer, best_blocks_text
from executor.model_tools.served import find_served
from executor.records.run_record import find_record
from executor.store.artifact_store import Store
from ops.lib.sglang.serve_command import Address
from ops.lib.sglang.version import VERSIONS
from ops.lib.vllm.version import VLLM_VERSION
from ops.tools.serve.chat import ChatPrompt

PROJECT = Path(__file__).resolve().parents[3]


def found(tmp_path, model_type="qwen3", node=None, config=None, **run):
    store, run_id = record_run(tmp_path, make_artifacts(tmp_path / "made", model_type, **(config or {})), **run)
    return store, find_served(store, find_record(store.records, run_id), node)


def test_the_checked_draft_is_served(tmp_path):
    store, served = found(tmp_path, states={"eval": {"metrics": {"eval/tau": 3.5}}})

    digests = find_record(store.records, None).state.nodes
    assert str(store.object_path(digests["check"].digest) / "draft") == served.draft.path
    assert store.object_path(digests["target"].digest) / "model" == served.target
    assert (4, "bfloat16", (), 3.5) == (served.draft.block_size, served.served.dtype, served.warnings, served.tau)


@pytest.mark.parametrize(
    ("run", "warning"),
    [
        ({"more": ""}, "no node checks the draft of export"),
        (
            {"states": {"check": {"state": "failed", "failure": Finding("DataError: tau")}}},
            "check failed: DataError: tau",
        ),
        (
            {"states": {"check": {"state": "failed", "failure": Finding("DataError: it breaks\n  the contract\n")}}},
            "check failed: DataError: it breaks | the contract",
        ),
        (
            {"states": {"check": {"state": "pending", "digest": None}}},
            "the draft of export has not been through its gate; check is pending",
        ),
    ],
)
def test_a_draft_that_no_gate_passed_is_served_with_a_warning(tmp_path, run, warning):
    store, served = found(tmp_path, **run)

    export = find_record(store.records, None).state.nodes["export"].digest
    assert str(store.object_path(export)) == served.draft.path
    assert 1 == len(served.warnings)
    assert warning in served.warnings[0]
    assert "\n" not in served.warnings[0]


def test_a_draft_that_sglang_was_not_asked_about_is_served_with_a_warning(tmp_path):
    made = make_artifacts(tmp_path / "made")
    live = {"status": "skipped", "reason": "no DFLASH\non a CPU"}
    (made["check"] / "check.json").write_text(json.dumps({"live": live}))
    store, run = record_run(tmp_path, made)
    (warning,) = find_served(store, find_record(store.records, run), None).warnings
    assert "check checked the draft without SGLang (no DFLASH | on a CPU)" in warning
    assert f"dflow resume {run} --from check" in warning


def test_a_skipped_check_that_sglang_has_no_worker_for_is_not_advised_to_run_again(tmp_path):
    made = make_artifacts(tmp_path / "made")
    live = {"status": "skipped", "reason": "no worker"}
    (made["check"] / "check.json").write_text(json.dumps({"live": live, "engine": "OTHER"}))
    store, run = record_run(tmp_path, made)
    (warning,) = find_served(store, find_record(store.records, run), None).warnings
    assert "--from check" not in warning and "with the tau of the evaluation" in warning


@pytest.mark.parametrize(
    ("algorithm", "refusal"),
    [
        ("DFLASH", "DFLASH speculative decoding is not supported by CpuPlatform on device 'cpu'."),
        ("DSPARK", "DSpark speculative decoding only supports CUDA, NPU or XPU device."),
    ],
)
def test_a_refusal_names_the_algorithm_that_was_asked_for(tmp_path, algorithm, refusal):
    server = EngineServer(
        ENGINES["sglang"], ["echo", f"ValueError: {refusal}"], {}, tmp_path / "log", algorithm=algorithm
    )
    with server, pytest.raises(ServerError, match=f"SGLang refuses {algorithm} on this machine"):
        server.wait()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("content", [None, '{"block_size": 8}'])
def test_a_checked_draft_whose_files_were_altered_is_not_served(tmp_path, content, is_shared):
    """Its digest tells, not its size alone. Files that check took over as links are altered in the export too."""
    made = make_artifacts(tmp_path / "made")
    store, run_id = record_run(tmp_path, made)
    record = find_record(store.records, run_id)
    folders = {node: store.object_path(record.state.nodes[node].digest) for node in ("check", "export")}
    config = folders["check"] / "draft" / "config.json"
    for path in [config, *([folders["export"] / "config.json"] if is_shared else [])]:
        size = path.stat().st_size
        path.unlink()
        if content is not None:
            path.write_text(content)
            assert size == path.stat().st_size

    with pytest.raises(StoreError) as caught:
        find_served(Store.open(store.path, write=False), record, None)
    assert (
        f"{config}: the checked draft is damaged: config.json is gone or was altered; make it again: "
        f"dflow resume {run_id} --from {'export' if is_shared else 'check'}"
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "config", "dtype"),
    [
        ("qwen3", {}, "bfloat16"),
        ("qwen3_vl", {"dtype": None, "text_config": {"dtype": "float16"}}, "float16"),
        ("qwen3_vl_moe", {"dtype": None, "torch_dtype": "float32"}, "float32"),
        ("qwen3_5", {"dtype": None}, "float32"),
    ],
)
def test_a_target_is_served_as_its_config_says(tmp_path, model_type, config, dtype):
    _store, run = found(tmp_path, model_type, config=config)

    vision = model_type != "qwen3"
    assert (model_type, vision, dtype) == (run.served.model_type, run.served.vision, run.served.dtype)
    assert ("torchvision" if vision else None) == run.served.image_backend
    assert ({"min_pixels": 64, "max_pixels": 1024} if vision else {}) == run.served.pixels


def test_without_the_training_in_the_store_the_tokens_tell_how_images_were_prepared(tmp_path):
    _store, run = found(tmp_path, "qwen3_vl", states={"train": {"digest": "0" * 64}})

    assert ("torchvision", {"min_pixels": 64, "max_pixels": 1024}) == (run.served.image_backend, run.served.pixels)


def test_sizes_of_images_are_said_only_where_the_target_has_others(tmp_path):
    _store, run = found(tmp_path, "qwen3_vl", config={"max_pixels": 1024})

    assert {} == run.served.pixels


def test_the_prompt_is_a_held_out_one_with_its_image(tmp_path):
    _store, run = found(tmp_path, "qwen3_vl")

    image = "data:image/png;base64," + base64.b64encode(b"PNG").decode()
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is it?"}]
    assert (ChatPrompt("b", [{"role": "user", "content": parts}]),) == run.prompts


def test_of_several_drafts_one_has_to_be_chosen(tmp_path):
    made = make_artifacts(tmp_path / "made")
    made["second"] = made["train"].with_name("other")
    made["second"].mkdir()
    (made["second"] / "config.json").write_text('{"block_size": 8}')
    store, run_id = record_run(tmp_path, made, more=CHECK + SECOND)
    record = find_record(store.records, run_id)

    with pytest.raises(StoreError, match="several drafts: export, second; choose one with --node"):
        find_served(store, record, None)
    assert [8, 4, 4] == [find_served(store, record, node).draft.block_size for node in ("second", "export", "check")]
    with pytest.raises(StoreError, match='"train" does not export a draft; nodes that do: export, second'):
        find_served(store, record, "train")


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        ({"target": {"state": "pending", "digest": None}}, "target is pending; run `dflow resume"),
        ({"target": {"digest": "0" * 64}}, "the artifact of target is missing or incomplete"),
    ],
)
def test_a_run_without_its_target_is_refused(tmp_path, states, problem):
    with pytest.raises(StoreError, match=problem):
        found(tmp_path, states=states)


def test_every_refused_argument_is_told_at_once_and_with_what_to_do(tmp_path):
    result = ServeCase(tmp_path).dflow("--check", extra=("--port=8000", "--model-path", "other"))

    assert (1, "") == (result.returncode, result.stdout)
    assert (
        "dflow: arguments after -- that dflow serve sets itself:\n"
        "  --port=8000: give --port before the --\n"
        "  --model-path: the run decides it; for another draft name its run, or choose with --node\n"
    ) == result.stderr


class ServeCase:
    """A store with a run, and the command on it, where `sglang` is the small server."""

    def __init__(
        self, folder: Path, model_type: str = "qwen3", version: str | None = VERSIONS[-1], **draft: Any
    ) -> None:
        made = make_artifacts(folder / "made", model_type)
        write_folder(made["check"], {"draft/config.json": {"block_size": 4, "dflow": draft}})
        self.store, self.run = record_run(folder, made)
        self.path = install_server(folder / "site", version) if version else folder
        self.port = free_port()

    def arguments(self, *arguments: str, extra: tuple[str, ...] = ()) -> list[str]:
        own = ["serve", "--store", str(self.store.path), "--port", str(self.port), *arguments]
        return [sys.executable, "-m", "executor.cli", *own, "--", *extra]

    @property
    def options(self):
        paths = f"{self.path}:{PROJECT}"
        kept = {name: os.environ[name] for name in ("PATH", "XDG_STATE_HOME")}
        return {"cwd": PROJECT, "env": {**kept, "PYTHONPATH": paths}, "text": True}

    def dflow(self, *arguments: str, extra: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = self.arguments(*arguments, extra=extra)
        return subprocess.run(command, **self.options, capture_output=True, timeout=300)

    @property
    def log(self) -> str:
        return (self.store.records / self.run / f"serve-{self.port}.log").read_text()

    def processes(self) -> list[int]:
        return [int(pid) for pid in re.search(r"^processes (\d+) (\d+)$", self.log, re.MULTILINE).groups()]


def test_check_shows_the_command_the_answer_and_the_accepted_length_and_stops_the_server(tmp_path):
    case = ServeCase(tmp_path)
    result = case.dflow("--check", extra=("--mem-fraction-static", "0.5"))

    assert (0, "") == (result.returncode, result.stderr)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{sys.executable} -m sglang.launch_server --model-path ")
    assert lines[0].endswith(f"--host 127.0.0.1 --port {case.port} --mem-fraction-static 0.5")
    assert [
        "prompt: What is it? (b)",
        "answer: It is blue.",
        "tau: 4 (8 tokens after the first in 2 verification steps); SGLang's spec_accept_length, which also counts "
        "the first token: 4.5",
    ] == lines[-3:]
    asked = json.loads(re.search(r"^asked (.*)$", case.log, re.MULTILINE).group(1))
    assert [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}] == asked["messages"]
    assert (0, True) == (asked["temperature"], asked["return_meta_info"])
    assert [False, False] == [is_running(pid) for pid in case.processes()]


def test_a_shorter_block_is_what_both_engines_get_and_a_longer_one_is_refused(tmp_path):
    _store, run = found(tmp_path)
    short = run.in_blocks(3)
    commands = {name: engine.command(short, Address(port=1), []) for name, engine in ENGINES.items()}
    assert "3" == commands["sglang"][commands["sglang"].index("--speculative-num-draft-tokens") + 1]
    spoken = json.loads(commands["vllm"][commands["vllm"].index("--speculative-config") + 1])
    assert 2 == spoken["num_speculative_tokens"]
    for size in (1, 5):
        with pytest.raises(ConfigError, match=rf"--block-size: must lie in 2\.\.4, which is the draft's, got {size}"):
            run.in_blocks(size)
    dspark = evolve(run, draft=evolve(run.draft, algorithm="DSPARK"))
    of_dspark = "SGLang reads the block of a DSPARK draft from its config.json"
    assert [of_dspark, ""] == [ENGINES[name].block_size_refusal(dspark) for name in ("sglang", "vllm")]
    assert ["", ""] == [engine.block_size_refusal(run) for engine in ENGINES.values()]


def measured_blocks(best: dict[int, int], *other: int) -> dict[str, float]:
    """Metrics of an evaluation under load: the best block of each batch size, and blocks beside the draft's own."""
    compared = {f"eval/speedup_batch_{batch}_block_{block}": 1.0 for batch in best for block in other}
    return {**{f"eval/best_block_batch_{batch}": float(block) for batch, block in best.items()}, **compared}


def test_the_best_blocks_of_the_evaluation_are_named_unless_a_block_is_chosen(tmp_path):
    case = ServeCase(tmp_path)
    record = find_record(case.store.records, case.run)
    record.state.nodes["eval"].metrics.update(measured_blocks({16: 2, 1: 4}, 2) | {"eval/best_block_batch": 3.0})
    record.save_all()
    first = case.dflow("--check").stdout.splitlines()[0]
    assert (
        "best block by batch, as the evaluation measured it: 4 for batches of 1, 2 for batches of 16 (--block-size)"
        == first
    )
    assert "--speculative-num-draft-tokens 2 " in case.dflow("--check", "--block-size", "2").stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("best", "algorithm", "advice"),
    [
        ({1: 2, 16: 2}, "DFLASH", "2 for batches of 1, 2 for batches of 16 (--block-size)"),
        ({1: 4, 16: 4}, "DFLASH", "4 for batches of 1, 4 for batches of 16"),
        (
            {1: 4, 16: 2},
            "DSPARK",
            "4 for batches of 1, 2 for batches of 16; SGLang reads the block of a DSPARK draft from its config.json, "
            "and serves in blocks of 4",
        ),
    ],
)
def test_best_blocks_of_all_loads_alike_are_named_too_and_no_block_is_advised_that_would_be_refused(
    tmp_path, best, algorithm, advice
):
    _store, run = found(tmp_path, states={"eval": {"metrics": measured_blocks(best, 2)}})
    assert best == run.best_blocks
    run = evolve(run, draft=evolve(run.draft, algorithm=algorithm))
    assert f"best block by batch, as the evaluation measured it: {advice}" == best_blocks_text(ENGINES["sglang"], run)


def test_where_a_single_block_size_was_measured_none_is_the_best(tmp_path):
    _store, run = found(tmp_path, states={"eval": {"metrics": measured_blocks({1: 2, 16: 2})}})
    assert {} == run.best_blocks


def test_a_server_that_runs_already_gets_no_block_and_no_arguments(capsys):
    given = ("serve", "--measure", "--url", "http://127.0.0.1:1", "--block-size", "2", "--", "--tp-size", "2")
    assert 1 == main(given)
    told = "--block-size, arguments after --: only of a new server, and that at --url runs already; leave this out"
    assert f"dflow: {told}\n" == capsys.readouterr().err


def test_measure_writes_the_figures_of_each_concurrency_and_stops_the_server(tmp_path):
    case = ServeCase(tmp_path)
    result = case.dflow("--measure", "--max-tokens", "5", "--concurrency", "2", "1")

    assert (0, "") == (result.returncode, result.stderr)
    *_, first, second, where = result.stdout.splitlines()
    assert ["concurrency 1: ", "concurrency 2: "] == [line[:15] for line in (first, second)]
    file = case.store.records / case.run / f"load-{case.port}.json"
    assert f"figures: {file}" == where
    figures = json.loads(file.read_text())
    assert ("SGLang", 4, ["b"], 5) == tuple(figures[name] for name in ("engine", "block_size", "prompts", "max_tokens"))
    assert [(1, 16, 0, 4.0), (2, 16, 0, 4.0)] == [
        tuple(level[name] for name in ("concurrency", "requests", "errors", "tau")) for level in figures["levels"]
    ]
    assert [False, False] == [is_running(pid) for pid in case.processes()]


def test_a_server_that_runs_already_is_measured_and_stays(tmp_path):
    case = ServeCase(tmp_path, version=None)
    meta = {"spec_verify_ct": 2, "spec_accept_length": 4.5}
    with ChatServer(lambda body: response("Blue.", usage={"completion_tokens": 9}, meta_info=meta)) as live:
        result = case.dflow("--measure", "--url", live.url, "--plain-url", live.url, "--concurrency", "3")
        port = live.url.partition("127.0.0.1:")[2].removesuffix("/v1")
    assert (0, "") == (result.returncode, result.stderr)
    figures = json.loads((case.store.records / case.run / f"load-{port}.json").read_text())
    assert figures.keys() >= {"pays_up_to", "costs_from"}
    assert "the draft pays" in result.stdout.splitlines()[-2]
    [level] = figures["levels"]
    assert (3, 4.0, 16) == (level["concurrency"], level["tau"], level["plain"]["requests"])
    alone = case.dflow("--url", "http://127.0.0.1:1", "--stream")
    assert (1, "dflow: --url, --stream: only with --measure; add it, or leave this out\n") == (
        alone.returncode,
        alone.stderr,
    )


def test_without_a_run_the_newest_with_a_finished_draft_is_served_and_named(tmp_path):
    case = ServeCase(tmp_path)
    later = later_partial_run(case.store, case.run, "train")
    result = case.dflow("--check")
    note = f"the latest run, {later.run} of served, has no finished draft; run {case.run} of served is used\n"
    assert (0, note) == (result.returncode, result.stderr)


def test_a_server_that_does_not_use_the_draft_fails_the_check(tmp_path):
    result = ServeCase(tmp_path).dflow("--check", extra=("--no-draft",))

    assert 1 == result.returncode
    assert "9 tokens without a verification step; the server does not use the draft" in result.stderr


def test_a_server_that_dies_at_its_start_shows_its_last_lines(tmp_path):
    case = ServeCase(tmp_path)
    result = case.dflow("--check", extra=("--die",))

    assert 1 == result.returncode
    assert result.stderr.startswith("dflow: the server ended with exit code 1\n")
    assert "    loading the model\n    RuntimeError: out of luck\nlog: " in result.stderr


def test_sglangs_refusal_is_told_as_such(tmp_path):
    result = ServeCase(tmp_path).dflow("--check", extra=("--refuse",))

    assert 1 == result.returncode
    assert (
        "dflow: SGLang refuses DFLASH on this machine; run the command on one with a GPU\n"
        "    ValueError: DFLASH speculative decoding is not supported by CpuPlatform on device 'cpu'.\n"
    ) in result.stderr


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.5.20", "and 0.5.20 is installed: pip install sglang=="),
        (None, "which is not installed: .venv/bin/pip install"),
    ],
)
def test_without_a_supported_version_the_command_is_shown_and_nothing_starts(tmp_path, version, problem):
    case = ServeCase(tmp_path, "qwen3_vl", version)
    result = case.dflow("--check")

    assert 1 == result.returncode
    assert problem in result.stderr
    command, notice = result.stdout.splitlines()
    assert f"-m ops.lib.sglang.launch_server --model-path {case.store.path}" in command
    assert "SGLang 0.5.21 or 0.5.23 lacks a method that DFLASH needs for qwen3_vl targets" in notice


@pytest.mark.parametrize(("version", "launcher"), [("0.5.21", "ops.lib.sglang"), ("0.5.23", "sglang")])
def test_the_launcher_is_the_one_that_the_installed_version_needs(tmp_path, version, launcher):
    """The doubled method of Qwen3.5's text model is gone in the newer one. The small server has nothing to patch."""
    result = ServeCase(tmp_path, "qwen3_5_text", version).dflow("--check")

    assert f" -m {launcher}.launch_server --model-path " in result.stdout
    assert (version == "0.5.21") is (f"SGLang {version} lacks a method that DFLASH needs" in result.stdout)
    assert (version == "0.5.21") is (result.returncode == 1)


def test_a_draft_for_one_version_is_served_by_no_other(tmp_path):
    result = ServeCase(tmp_path, "qwen3", "0.5.21", engine="sglang-0.5.23").dflow("--check")

    assert 1 == result.returncode
    assert "needs SGLang 0.5.23, for which the draft was exported" in result.stderr
    assert "0.5.21 is installed: pip install sglang==0.5.23, or export the draft with engine" in result.stderr
    assert "-m sglang.launch_server --model-path" in result.stdout


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path):
    case = ServeCase(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", case.port))
        other.listen()
        result = case.dflow("--check")

    assert 1 == result.returncode
    assert f"127.0.0.1:{case.port}: Address already in use; choose another --port" in result.stderr


class VLLMCase(ServeCase):
    """The command on a run, where `vllm` is the small server; none for no version."""

    def __init__(self, folder: Path, version: str | None = VLLM_VERSION, model_type: str = "qwen3") -> None:
        super().__init__(folder, model_type, version=None)
        self.programs = install_vllm(folder / "vllm", version) if version else folder / "none"

    def arguments(self, *arguments: str, extra: tuple[str, ...] = ()) -> list[str]:
        return super().arguments("--engine", "vllm", *arguments, extra=extra)

    @property
    def options(self):
        plain = super().options
        env = plain["env"] | {"PATH": f"{self.programs}:/usr/bin:/bin", "PYTHONPATH": f"{self.programs}:{PROJECT}"}
        return plain | {"env": env}


def test_vllm_serves_the_draft_and_its_figures_are_shown(tmp_path):
    case = VLLMCase(tmp_path)
    result = case.dflow("--check", extra=("--gpu-memory-utilization", "0.5"))

    assert (0, "") == (result.returncode, result.stderr)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"vllm serve {case.store.path}")
    assert '"num_speculative_tokens": 3}' in lines[0]
    assert lines[0].endswith(f"--host 127.0.0.1 --port {case.port} --gpu-memory-utilization 0.5")
    assert (
        "tau: 4 (8 tokens after the first in 2 verification steps); vLLM's mean_acceptance_length, which also counts "
        "what follows the end of the answer: 4.25"
    ) == lines[-1]
    asked = json.loads(re.search(r"^asked (.*)$", case.log, re.MULTILINE).group(1))
    assert {"messages", "temperature", "max_tokens"} == asked.keys()
    assert [False, False] == [is_running(pid) for pid in case.processes()]


@pytest.mark.parametrize(
    ("version", "problem"),
    [("0.32.0", "is of 0.32.0: pip install vllm==0.33.0"), (None, "neither beside this Python nor on PATH")],
)
def test_without_the_supported_vllm_the_command_is_shown_and_nothing_starts(tmp_path, version, problem):
    result = VLLMCase(tmp_path, version).dflow("--check")

    assert 1 == result.returncode
    assert problem in result.stderr
    (command,) = result.stdout.splitlines()
    assert command.startswith("vllm serve ")


def test_a_target_with_images_is_served_by_vllms_newer_model_runner(tmp_path):
    result = VLLMCase(tmp_path, None, "qwen3_vl").dflow("--check")

    assert result.stdout.startswith("VLLM_USE_V2_MODEL_RUNNER=1 vllm serve ")


def test_the_key_of_vllm_is_neither_in_its_arguments_nor_in_its_log(tmp_path, monkeypatch):
    case = VLLMCase(tmp_path)
    options = case.options
    options["env"] |= {"VLLM_API_KEY": "top-secret"}
    command = case.arguments("--check", extra=("--name", "top-secret"))
    result = subprocess.run(command, **options, capture_output=True, timeout=300)

    assert 0 == result.returncode
    assert 'arguments ["serve"' in case.log and "top-secret" not in case.log


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_the_server_and_its_children_end_with_dflow(tmp_path, ending, code):
    """A child that ignores SIGTERM is killed."""
    case = ServeCase(tmp_path)
    options = {**case.options, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(case.arguments(), **options) as dflow:
        for line in dflow.stdout:
            if line == "Ctrl-C stops it\n":
                break
        pids = case.processes()
        before = [is_running(pid) for pid in pids]
        dflow.send_signal(ending)
        dflow.wait(300)

    assert ([True, True], code) == (before, dflow.returncode)
    deadline = time.monotonic() + 120
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [False, False] == [is_running(pid) for pid in pids]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_benchmark_asks_both_sides_the_same_at_every_concurrency_and_starts_the_other_side_first_in_turn(tmp_path):
    case = ServeCase(tmp_path)
    own = ["", "--store", str(case.store.path), "--port", str(case.port), "--rounds", "2", "--concurrency", "1", "2"]
    command = [sys.executable, "benchmarks/serve.py", *own, "--json", str(tmp_path / "figures.json")]
    result = subprocess.run(command, **case.options, capture_output=True, timeout=300)

    assert (0, "") == (result.returncode, result.stderr)
    started = [line for line in result.stdout.splitlines() if line.startswith("python -m sglang.launch_server")]
    assert [True, False, False, True] == ["--speculative-algorithm" in line for line in started]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {"1": 2, "2": 2} == {name: len(rounds) for name, rounds in figures["concurrency"].items()}
    for outcome in (outcome for rounds in figures["concurrency"].values() for outcome in rounds):
        assert outcome["with_draft"] / outcome["alone"] == outcome["speed_up"]
        assert (8 / 2, 9 / 2, 1) == (outcome["tau"], outcome["spec_accept_length"], outcome["same_answers"])
    assert 2 == len(re.findall(r"^\| [12] +\|.*\| 4\.00 \| 4\.50 +\| 1 of 1", result.stdout, re.MULTILINE))


@pytest.mark.parametrize("place", ["own_code.Own", "stranger/repo--own_code.Own"])
@pytest.mark.parametrize("name", ["export", "check", "speculators", "target"])
def test_a_draft_or_a_target_that_names_code_is_not_served(tmp_path, name, place):
    """SGLang would run it also without --trust-remote-code, where it does not know the architecture."""
    made = make_artifacts(tmp_path / "made")
    checked = made["check"] / "draft"
    shutil.copytree(checked, checked / "speculators")
    folders = {
        "export": made["export"],
        "check": checked,
        "speculators": checked / "speculators",
        "target": made["target"] / "model",
    }
    folder = folders[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": place}}))
    store, run = record_run(tmp_path, made, more="" if name == "export" else CHECK)
    with pytest.raises(DataError, match="auto_map names code"):
        find_served(store, find_record(store.records, run), None)


def test_vllms_command_names_its_own_method_and_another_algorithm_is_refused_by_name(tmp_path):
    _store, served = found(tmp_path)
    address = Address()
    for algorithm, method in (("DFLASH", "dflash"), ("DSPARK", "dspark")):
        run = evolve(served, draft=evolve(served.draft, algorithm=algorithm))
        command = ENGINES["vllm"].command(run, address, ())
        given = json.loads(command[command.index("--speculative-config") + 1])
        assert (method, served.draft.block_size - 1) == (given["method"], given["num_speculative_tokens"])
        assert algorithm in ENGINES["sglang"].command(run, address, ())
    other = evolve(served, algorithm="mine", draft=evolve(served.draft, algorithm=""))
    with pytest.raises(DataError, match="vLLM does not serve drafts of the algorithm mine"):
        ENGINES["vllm"].command(other, address, ())


@pytest.mark.parametrize(
    ("body", "launcher"),
    [
        ("def set_dflash_layers_to_capture(self, layers): ...", "sglang.launch_server"),
        ("def set_eagle3_layers_to_capture(self, layers): ...", "ops.lib.sglang.launch_server"),
        ("pass", None),
    ],
)
def test_the_targets_class_in_the_installed_sglang_chooses_the_launcher_or_refuses(
    tmp_path, monkeypatch, body, launcher
):
    _store, run = found(tmp_path)
    (run.target / "config.json").write_text(json.dumps({"model_type": "own", "architectures": ["OwnForCausalLM"]}))
    run = evolve(run, served=evolve(run.served, model_type="own"))
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (models / "own.py").write_text(f"class OwnForCausalLM:\n    {body}\nEntryClass = OwnForCausalLM\n")
    described = tmp_path / f"sglang-{VERSIONS[-1]}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSIONS[-1]}\n")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)  # `tests/sglang`, once imported in vain
    monkeypatch.syspath_prepend(str(tmp_path))
    if launcher is None:
        with pytest.raises(DataError, match=r"the target's model_type is own: SGLang .* serves no draft for it"):
            ENGINES["sglang"].command(run, Address(), ())
    else:
        assert launcher == ENGINES["sglang"].command(run, Address(), ())[2]
        assert launcher.startswith("ops") is bool(ENGINES["sglang"].notice(run))


def test_what_vllm_was_not_tried_with_and_an_engine_that_it_is_not_are_warned_of(tmp_path):
    _store, served = found(tmp_path)
    assert () == tuple(ENGINES["vllm"].warnings(served))
    (untried,) = ENGINES["vllm"].warnings(evolve(served, algorithm="dflash2"))
    assert "vLLM serves dflash2 drafts with its newer model runner only" in untried
    (pinned,) = ENGINES["vllm"].warnings(evolve(served, engine="sglang-0.5.21"))
    assert "exported for sglang-0.5.21" in pinned
    assert () == tuple(ENGINES["sglang"].warnings(evolve(served, algorithm="dflash2", engine="sglang-0.5.21")))


def test_of_vision_towers_in_sglang_those_that_are_not_qwens_are_warned_of_by_name(tmp_path):
    _store, run = found(tmp_path)
    for kind, warned in (("qwen3_vl", False), ("gemma3", True)):
        (run.target / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": {"depth": 2}}))
        warnings = ENGINES["sglang"].warnings(run)
        assert warned is any(text.startswith(f"the target ({kind}) has a vision tower") for text in warnings)
    (run.target / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    assert () == tuple(ENGINES["sglang"].warnings(run))


ROPES = {
    "longrope": {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 4096},
}


@pytest.mark.parametrize("kind", [None, *ROPES])
def test_requests_are_kept_within_the_first_range_of_a_rope_and_that_is_said(tmp_path, kind):
    _store, run = found(tmp_path, config=ROPES.get(kind, {"max_position_embeddings": 131_072}))
    for name, argument, limit in (("sglang", "--context-length", "4092"), ("vllm", "--max-model-len", "4096")):
        command, warnings = ENGINES[name].command(run, Address(), ()), ENGINES[name].warnings(run)
        if kind is None:
            assert (argument in command, [*warnings]) == (False, [])
            continue
        assert limit == command[command.index(argument) + 1]
        (warning,) = warnings
        assert "beyond 4,096 tokens the target's RoPE turns all texts of a batch by other angles" in warning
        assert f"{argument} of the command refuses such requests, and must not be raised" in warning
        assert ("dynamic RoPE" in warning) == (kind == "dynamic" and name == "sglang")


def test_the_algorithm_of_a_draft_is_read_from_its_config(tmp_path):
    made = make_artifacts(tmp_path / "made")
    nest = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    config = {"block_size": 4, "dflash_config": nest, "dflow": {"algorithm": "dflash2"}}
    for file in (made["check"] / "draft" / "config.json", made["export"] / "config.json"):
        file.write_text(json.dumps(config))
    store, run = record_run(tmp_path, made)
    served = find_served(store, find_record(store.records, run), None)
    assert ("dflash2", "DFLASH", 4) == (served.algorithm, served.draft.algorithm, served.draft.block_size)


def test_a_draft_that_no_server_serves_is_refused(tmp_path):
    made = make_artifacts(tmp_path / "made")
    for file in (made["check"] / "draft" / "config.json", made["export"] / "config.json"):
        file.write_text(json.dumps({"block_size": 4, "dflow": {"algorithm": "slot_bias"}, "slot_bias_scale": 2.0}))
    store, run = record_run(tmp_path, made)
    with known_slot_bias(), pytest.raises(DataError, match=r"no server serves this algorithm \(slot_bias\)"):
        find_served(store, find_record(store.records, run), None)
