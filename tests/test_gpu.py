"""What is prepared for a machine with a GPU: every line of its benchmark at tiny sizes, and what its tests import."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from gpu_selection import is_of_a_device
from import_graph import reached

from benchmarks.gpu import Part, figures_of, in_process, main, parts_of

ROOT = Path(__file__).parent.parent
TINY = ["--device", "cpu", "--tiny"]
FIRST_COMPILATION = """
import pytest, torch, warnings
from torch._inductor import compile_fx
from ops.lib.kernels.compiled import compiled

def test_that_it_compiles():
    assert [2, 2] == compiled(lambda x: x + 1)(torch.ones(2)).tolist()

def test_that_it_compiles_float32_on_a_large_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        compile_fx._warn_tf32_disabled.__wrapped__()
    assert 1 == len(noted)
    compile_fx._warn_tf32_disabled.__wrapped__()

def test_that_another_warning_is_an_error():
    with pytest.raises(UserWarning, match="of its own"):
        warnings.warn("of its own")
"""
# What such a machine lacks, and tests/gpu/requirements.txt does not bring.
ABSENT = {"mlflow", "datasets", "jsonschema", "sqlalchemy", "google", "ruff", "mypy"}


def loaded_once(part: Part, _limit: float) -> dict:
    """A part's module as `in_process` runs it, in this process: loading torch nine times costs a minute of CPU."""
    printed, before, file = io.StringIO(), sys.argv, Path("part.json")
    sys.argv = [part.module, *part.options, *([f"--json={file}"] if part.writes_file else [])]
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("default")  # as in a process of its own
            runpy.run_path(str(ROOT / f"{part.module.replace('.', '/')}.py"), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code
    finally:
        sys.argv = before
    return {"status": "done", "figures": figures_of(printed.getvalue(), file if part.writes_file else None)}


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The figures of a dry run of all parts, and its page; without speculators, which has an interpreter of its own."""
    folder = tmp_path_factory.mktemp("gpu")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert 0 == main([*TINY, "--out", "figures"], start=loaded_once)
        assert {"figures.json", "figures.md", "part.json"} == {file.name for file in folder.iterdir()}
        return json.loads(Path("figures.json").read_text()), Path("figures.md").read_text()


@pytest.fixture
def figures(dry_run):
    return {name: entry["figures"] for name, entry in dry_run[0]["parts"].items() if "figures" in entry}


def cells(page, *first):
    """The cells of the row that begins with these."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    return next(row for row in rows if row[: len(first)] == list(first))


def test_every_part_runs_at_tiny_sizes_and_what_is_not_installed_is_skipped(dry_run):
    found, page = dry_run
    assert [part.name for part in parts_of("cpu", True)] == list(found["parts"])
    skipped = [name for name, entry in found["parts"].items() if entry["status"] != "done"]
    assert skipped in (["step 96 speculators"], ["capture by SGLang", "step 96 speculators"])
    assert all(entry["seconds"] > 0 for name, entry in found["parts"].items() if name not in skipped)
    assert "Tiny sizes" in page
    assert f"torch {torch.__version__}" in page
    assert found["commit"] in page


def test_both_sides_of_a_step_have_one_loss_and_the_page_has_their_ratio(figures, dry_run):
    assert figures["step 96 chunked"]["loss"] == pytest.approx(figures["step 96 ours"]["loss"], rel=1e-5)
    for context in (96, 192):
        ours, dense = figures[f"step {context} ours"], figures[f"step {context} dense"]
        assert ours["loss"] == pytest.approx(dense["loss"], rel=1e-5)
        assert ours["correct"] == dense["correct"]
        shown = cells(dry_run[1], str(context), "ratio")
        assert f"{dense['seconds'] / ours['seconds']:.2f}" == shown[2]
        machine = figures["machine"]
        mfu = machine["step_flops"][str(context)] / ours["seconds"] / machine["matmul_flops"]
        assert [f"{context / ours['seconds']:,.0f}", f"{mfu:.1%}"] == cells(dry_run[1], str(context), "ours")[4:6]
    assert figures["machine"]["step_flops"]["192"] > figures["machine"]["step_flops"]["96"]


def test_attention_head_and_one_rank_compute_what_plain_ones_do(figures):
    for row in figures["attention"]["attention"]:
        limit = 1e-5 if row["dtype"] == "float32" else 3e-2
        assert max(row["error_forward"], row["error_gradients"]) < limit
    assert [None, None, 32, 32] == [row["window"] for row in figures["attention"]["attention"]]
    for row in figures["attention"]["head"]:
        assert max(row["error_loss"], row["error_gradient"]) < (1e-5 if row["dtype"] == "float32" else 3e-2)
    one, sharded = (figures["ranks"]["steps"][name] for name in ("one process", "fsdp2"))
    assert sharded["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert sharded["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-2)
    assert all(collective["right"] for collective in figures["ranks"]["collectives"].values())


def test_capture_and_decoding_are_measured(figures, dry_run):
    captured, speed = figures["capture"], figures["capture"]["tokens_per_second"]
    assert f"{speed['median']:,.0f}" == cells(dry_run[1], "transformers")[1]
    assert [captured["tokens"] / seconds for seconds in captured["seconds"]["times"]] == speed["times"]
    assert {"plain 3", "speculative 3"} == set(figures["evaluate"])
    assert all([] == each["margins_of_differing"] for each in figures["evaluate"].values())


def test_the_command_starts_its_parts_as_processes_and_writes_where_it_was_called(tmp_path):
    command = [ROOT / "benchmarks/gpu.sh", *TINY, "--only", "machine", "--out", "found"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    (entry,) = json.loads((tmp_path / "found.json").read_text())["parts"].values()
    assert torch.__version__ == entry["figures"]["versions"]["torch"]


def test_a_part_that_hangs_is_killed_with_all_that_it_started_and_one_that_fails_says_why(tmp_path):
    hang = (
        f"import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('{tmp_path}/pid', 'w')); input()"
    )
    hang = hang.replace("input()", "__import__('time').sleep(600)")
    began = time.monotonic()
    entry = in_process(Part("hangs", "timeit", ("-n1", "-r1", hang), 0), 5)
    assert {"status": "timed out", "why": "ended after 5 s"} == entry
    assert time.monotonic() - began < 60
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)
    entry = in_process(Part("fails", "timeit", ("-n1", "-r1", "raise ValueError('no such thing')"), 0), 60)
    assert ("failed", "exit code 1") == (entry["status"], entry["why"])
    assert "ValueError: no such thing" in entry["output"]


def is_running(pid):
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_page_marks_a_step_whose_loss_is_not_that_of_the_dense_reference(tmp_path):
    def start(part, _limit):
        loss = {"step 96 ours": 1.52, "step 192 ours": 1.51}.get(part.name, 1.5)
        return {"status": "done", "figures": {"seconds": 2.0, "mib": 10.0, "loss": loss, "correct": 3}}

    main([*TINY, "--only", "step", "--out", str(tmp_path / "found")], start=start)
    page = (tmp_path / "found.md").read_text()
    assert "NOT THE SAME STEP: off by 1.3e-02" == cells(page, "96", "ratio")[7]
    assert "off by 6.7e-03" == cells(page, "192", "ratio")[7]


def test_after_a_part_that_fails_the_others_go_on_and_the_page_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def start(part, _limit):
        if part.name.endswith("dense"):
            return {"status": "failed", "why": "exit code 1", "output": "Traceback:\nOutOfMemoryError: 3 | 4 GiB"}
        return {"status": "done", "figures": {"seconds": 2.0, "mib": 10.0, "loss": 1.5, "correct": 3}}

    assert 1 == main([*TINY, "--only", "step", "--out", str(tmp_path / "found")], start=start)
    page = (tmp_path / "found.md").read_text()
    assert ["2.00 s", "2.00 s to 2.00 s", "48"] == cells(page, "96", "ours")[2:5]
    assert "step 192 dense | failed | 0 | exit code 1: OutOfMemoryError: 3 \\| 4 GiB |" in page
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert ["done", "failed", "done", "failed", "done", "skipped"] == [entry["status"] for entry in found.values()]


def test_parts_for_which_no_time_is_left_are_not_started(tmp_path):
    def start(part, limit):
        raise AssertionError(f"{part.name} was started with {limit} s left")

    assert 1 == main([*TINY, "--deadline", "0", "--out", str(tmp_path / "found")], start=start)
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    absent = {"sglang is not installed", "speculators is not installed"}
    assert {"no time was left for it", *absent} >= {entry["why"] for entry in found.values()}


def test_the_first_compilation_of_a_process_passes_under_the_projects_filters_of_warnings(tmp_path):
    (tmp_path / "test_first.py").write_text(FIRST_COMPILATION)
    options = ["-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "3 passed" in done.stdout, done.stdout
    assert 0 == done.returncode


def test_what_runs_on_a_gpu_imports_nothing_that_such_a_machine_lacks():
    tests = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if is_of_a_device(file)]
    tests = [file for file in tests if "sglang" not in file.parts]
    assert {"test_device_training.py", "test_dflash_step.py"} <= {file.name for file in tests}
    benchmark = [ROOT / "benchmarks/gpu.py", ROOT / "benchmarks/evaluate.py", *ROOT.glob("benchmarks/gpu_parts/*.py")]
    benchmark += [ROOT / "benchmarks/sides/ours.py", ROOT / "benchmarks/sides/dense.py"]
    for file in (*tests, *benchmark, ROOT / "tests/conftest.py", ROOT / "tests/ops/conftest.py"):
        assert set() == ABSENT & reached(file, in_functions=False), file
