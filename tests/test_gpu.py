"""What is prepared for a machine with a GPU: every line of its benchmark at tiny sizes, and what its tests import."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import time
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_selection import is_of_a_device
from import_graph import reached

from benchmarks import gpu_report
from benchmarks.gpu import Part, figures_of, in_process, main, outcomes, parts_of
from benchmarks.gpu_parts import capture
from benchmarks.gpu_sizes import ALGORITHMS, step_sizes
from benchmarks.sides.ours import draft_config, draft_model, sized, terms
from benchmarks.sides.problem import Sizes, make_problem, slot_targets
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.backbone.sizes import step_flops
from ops.lib.drafts.dflash2.config import Dflash2

ROOT = Path(__file__).parent.parent
TINY = ["--device", "cpu", "--tiny"]
FIRST_COMPILATION = """
import pytest, torch, warnings
from torch._inductor import compile_fx
from ops.lib.kernels.device import compiled

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
    """The figures of a dry run of all parts but the tests, its page, and the files it wrote."""
    folder = tmp_path_factory.mktemp("gpu")
    with contextlib.chdir(folder):
        assert 0 == main([*TINY, "--no-tests", "--budget", "1e6", "--out", "figures"], start=loaded_once)
    out = folder / "figures"
    return (
        json.loads((out / "gpu.json").read_text()),
        (out / "gpu.md").read_text(),
        {file.name for file in out.iterdir()},
    )


@pytest.fixture
def figures(dry_run):
    return {name: entry["figures"] for name, entry in dry_run[0]["parts"].items() if "figures" in entry}


def cells(page, *first):
    """The cells of the row that begins with these."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    return next(row for row in rows if row[: len(first)] == list(first))


def test_every_part_runs_at_tiny_sizes_and_what_is_not_installed_is_skipped(dry_run):
    found, page, files = dry_run
    beside, alone = parts_of("cpu", True, Path())
    assert [part.name for part in (*beside[1:], *alone)] == list(found["parts"])
    needed = {part.name: part.needs for part in (*beside, *alone) if part.needs}
    for name, entry in found["parts"].items():
        if entry["status"] == "done":
            assert entry["seconds"] > 0
        else:
            assert f"{needed[name]} is not installed" == entry["why"]
    assert {"specforge", "speculators", "sglang"} == set(needed.values())
    assert {"gpu.json", "gpu.md", *(f"profile_{name}.txt" for name in ALGORITHMS)} == files
    assert "Tiny sizes" in page
    assert f"torch {torch.__version__}" in page
    assert found["commit"] in page


def test_both_sides_of_a_step_have_one_loss_and_the_page_compares_them_with_ours(figures, dry_run):
    ours, dense, chunked = (figures[f"step 96 dflash {side}"] for side in ("ours", "dense", "chunked"))
    assert chunked["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert ours["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    assert ours["correct"] == dense["correct"]
    row = cells(dry_run[1], "96", "dflash", "dense")
    assert f"{dense['seconds'] / ours['seconds']:.2f}x" == row[5]
    assert row[9].startswith(f"{dense['loss']:.6f}, ours off by ")


def test_each_algorithms_use_of_the_device_is_by_its_own_count_of_operations(figures, dry_run):
    machine = figures["machine"]
    for context, algorithm in [(96, "dflash"), (96, "dspark"), (96, "dflash2"), (192, "dflash"), (384, "dflash")]:
        ours, flops = figures[f"step {context} {algorithm} ours"], machine["step_flops"][algorithm][str(context)]
        mfu = flops / ours["seconds"] / machine["matmul_flops"]
        shown = [f"{context / ours['seconds']:,.0f}", f"{mfu:.1%}"]
        assert shown == cells(dry_run[1], str(context), algorithm, "ours")[6:8]
    sizes = Sizes(**step_sizes(True, 96))
    problem = make_problem(sizes)
    weights = slot_targets(problem)[1]
    counted = step_flops(
        draft_config(sizes, Dflash2(rank=4)),
        int(problem.anchors_A.max()),
        sizes.anchors,
        int(problem.anchors_A.sum()),
        int((weights > 0).sum()),
    )
    assert counted == machine["step_flops"]["dflash2"]["96"]
    assert machine["step_flops"]["dflash"]["96"] < machine["step_flops"]["dflash"]["192"]


def test_a_model_is_made_on_its_device_with_the_rotary_frequencies_of_the_host():
    problem = make_problem(Sizes(**step_sizes(True, 96)), torch.bfloat16)
    given = {name: weight.to("meta") for name, weight in problem.weights.items()}
    problem = replace(problem, features_SF=problem.features_SF.to("meta"), weights=given)  # in the place of a GPU
    for algorithm in ALGORITHMS:
        model = draft_model(problem, sized(algorithm, terms(problem.sizes, algorithm)))
        assert {("meta", torch.float32)} == {(each.device.type, each.dtype) for each in model.parameters()}
        assert torch.equal(DraftModel(model.config).frequencies, model.frequencies)


def test_a_profile_names_the_kernels_and_both_optimizers_update_all_weights(figures, dry_run):
    for algorithm in ALGORITHMS:
        found = figures[f"profile {algorithm}"]
        assert found["wall"] >= found["host"] > 0
        assert sum(each["seconds"] for each in found["kernels"]) <= found["device"]
        first = found["kernels"][0]
        own = dry_run[1].partition(f"\n{algorithm}: ")[2]  # a kernel stands in the table of each algorithm
        assert str(first["count"]) == cells(own, first["name"].replace("|", "\\|"))[2]
    weights = sum(
        parameter.numel() for parameter in DraftModel(draft_config(Sizes(**step_sizes(True, 96)))).parameters()
    )
    assert f"one step over {weights:,} weights" in dry_run[1]
    assert ["adamw", "muon"] == list(figures["optimizer"]["updates"])
    assert figures["optimizer"]["updates"]["muon"]["median"] > 0


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
    place = "memory" if captured["in_memory"] else "the disk"
    assert f"{speed['median']:,.0f}" == cells(dry_run[1], f"transformers, into {place}")[1]
    assert [captured["tokens"] / seconds for seconds in captured["seconds"]["times"]] == speed["times"]
    assert {"plain 3", "speculative 3"} == set(figures["evaluate"])
    assert all([] == each["margins_of_differing"] for each in figures["evaluate"].values())


def test_a_capture_is_written_to_memory_where_it_has_room(tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "IN_MEMORY", tmp_path)
    assert tmp_path == capture.memory_folder(1)
    assert None is capture.memory_folder(2**62)
    monkeypatch.setattr(capture, "IN_MEMORY", tmp_path / "none")
    assert None is capture.memory_folder(1)


def test_the_command_starts_its_parts_with_the_wheels_installed_and_writes_where_it_was_called(tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/specforge-9.8.7-py3-none-any.whl", "w") as wheel:
        wheel.writestr("specforge-9.8.7.dist-info/METADATA", "Metadata-Version: 2.1\nName: specforge\nVersion: 9.8.7\n")
        wheel.writestr("specforge-9.8.7.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("specforge-9.8.7.dist-info/RECORD", "")
    command = [ROOT / "benchmarks/gpu.sh", *TINY, "--only", "machine", "--out", "found"]
    environment = {**os.environ, "PYTHON": sys.executable, "WHEELS": str(tmp_path / "wheels"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    (entry,) = json.loads((tmp_path / "found/gpu.json").read_text())["parts"].values()
    versions = entry["figures"]["versions"]
    assert (torch.__version__, "9.8.7") == (versions["torch"], versions["specforge"])
    assert {"wheels", "found"} == {file.name for file in tmp_path.iterdir()}


def test_a_part_that_hangs_is_killed_with_all_that_it_started_and_one_that_fails_says_why(tmp_path):
    hang = (
        f"import subprocess; print(subprocess.Popen(['sleep', '600']).pid, file=open('{tmp_path}/pid', 'w')); input()"
    )
    hang = hang.replace("input()", "__import__('time').sleep(600)")
    entry = in_process(Part("hangs", "timeit", ("-n1", "-r1", hang), 0), 20)
    assert {"status": "timed out", "why": "ended after 20 s"} == entry
    pid = int((tmp_path / "pid").read_text())
    for _ in range(1200):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)
    entry = in_process(Part("fails", "timeit", ("-n1", "-r1", "raise ValueError('no such thing')"), 0), 60)
    assert ("failed", "exit code 1") == (entry["status"], entry["why"])
    assert "ValueError: no such thing" in entry["output"]
    entry = in_process(Part("says nothing", "timeit", ("-n1", "-r1", "pass"), 0), 60)
    assert ("failed", "it printed no figures") == (entry["status"], entry["why"])


def is_running(pid):
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_tests_that_ran_until_a_limit_are_counted_and_those_that_failed_are_on_the_page(tmp_path):
    printed = """
[gw1] [  1%] PASSED tests/ops/test_a.py::test_that_it_is[2 | 3]
tests/ops/test_a.py::test_that_it_was
[gw0] [  2%] SKIPPED tests/ops/test_a.py::test_that_it_was
[gw1] [  3%] FAILED tests/ops/test_b.py::test_that_it_will_be[a b]
[gw1] [  3%] ERROR tests/ops/test_b.py::test_that_it_will_be[a b]
[gw1] [  4%] PASSED tests/ops/test_b.py::test_last
"""
    failed = "tests/ops/test_b.py::test_that_it_will_be[a b]"
    found = outcomes(printed)
    assert {"passed": 2, "skipped": 1, "failed": [failed]} == found

    def start(part, _limit):
        assert part.log == tmp_path / "found/tests.log"
        return {"status": "timed out", "why": "ended after 9 s", "figures": found}

    assert 1 == main([*TINY, "--only", "tests", "--out", str(tmp_path / "found")], start=start)
    shown = (tmp_path / "found/gpu.md").read_text()
    assert f"2 passed, 1 skipped, 1 failed; tests.log says more.\n- {failed}" in shown
    assert ["timed out", "0", "ended after 9 s"] == cells(shown, "tests")[1:]


def test_the_page_marks_a_step_whose_loss_is_not_that_of_the_dense_reference(tmp_path):
    def start(part, _limit):
        loss = {"step 96 dflash ours": 1.52, "step 96 dflash dense": 1.5}.get(part.name, 1.51)
        return {"status": "done", "figures": {"seconds": 2.0, "mib": 10.0, "loss": loss, "correct": 3}}

    main([*TINY, "--only", "step", "--out", str(tmp_path / "found")], start=start)
    shown = (tmp_path / "found/gpu.md").read_text()
    assert "1.500000, ours IS NOT THE SAME STEP: off by 1.3e-02" == cells(shown, "96", "dflash", "dense")[9]
    assert "1.510000, ours off by 6.6e-03" == cells(shown, "96", "dflash", "chunked")[9]


def test_specforges_dflash_must_have_our_loss_and_other_steps_of_peers_need_not():
    found = {"commit": "", "device": "cuda", "tiny": True, "seconds": 1.0, "parts": {}}
    losses = {
        "dflash ours": 1.52,
        "dflash SpecForge": 1.5,
        "dflash speculators": 5.0,
        "dspark ours": 3.0,
        "dspark SpecForge": 4.0,
    }
    for name, loss in losses.items():
        figures = {"seconds": 2.0, "mib": 10.0, "loss": loss, "correct": 3}
        found["parts"][f"step 96 {name}"] = {"status": "done", "seconds": 1.0, "figures": figures}
    shown = gpu_report.page(found)
    assert "1.500000, ours IS NOT THE SAME STEP: off by 1.3e-02" == cells(shown, "96", "dflash", "SpecForge")[9]
    assert "5.000000" == cells(shown, "96", "dflash", "speculators")[9]
    assert "4.000000" == cells(shown, "96", "dspark", "SpecForge")[9]


def test_after_a_part_that_fails_the_others_go_on_and_the_page_tells(tmp_path):
    def start(part, _limit):
        if part.name.endswith("dense"):
            return {"status": "failed", "why": "exit code 1", "output": "Traceback:\nOutOfMemoryError: 3 | 4 GiB"}
        return {"status": "done", "figures": {"seconds": 2.0, "mib": 10.0, "loss": 1.5, "correct": 3}}

    assert 1 == main([*TINY, "--only", "step", "--out", str(tmp_path / "found")], start=start)
    shown = (tmp_path / "found/gpu.md").read_text()
    assert ["2.00 s", "2.00 s to 2.00 s", "1.00x", "48"] == cells(shown, "96", "dflash", "ours")[3:7]
    assert "step 96 dflash dense | failed | 0 | exit code 1: OutOfMemoryError: 3 \\| 4 GiB |" in shown
    found = json.loads((tmp_path / "found/gpu.json").read_text())["parts"]
    assert ("failed", "done") == (found["step 96 dflash dense"]["status"], found["step 96 dflash chunked"]["status"])


def test_parts_for_which_no_time_is_left_are_not_started(tmp_path):
    def start(part, limit):
        raise AssertionError(f"{part.name} was started with {limit} s left")

    assert 1 == main([*TINY, "--budget", "0", "--out", str(tmp_path / "found")], start=start)
    found = json.loads((tmp_path / "found/gpu.json").read_text())["parts"]
    absent = {f"{name} is not installed" for name in ("sglang", "speculators", "specforge")}
    assert {"no time was left for it", *absent} >= {entry["why"] for entry in found.values()}


def test_the_budget_counts_from_when_the_command_began_and_what_runs_beside_the_tests_leaves_time(tmp_path):
    limits = {}

    def start(part, limit):
        limits[part.name] = limit
        return {"status": "failed", "why": "of no interest"}

    main(["--budget=540", f"--began={time.time() - 40}", "--out", str(tmp_path / "found")], start=start)
    assert 60 < limits["tests"] <= 122
    assert 60 < limits["compile dflash ours"] <= 120
    assert 60 == limits["step 3072 dflash ours"]
    limits.clear()
    main(["--budget=540", f"--began={time.time() - 500}", "--out", str(tmp_path / "found")], start=start)
    assert not {"tests", "compile dflash ours"} & limits.keys()
    assert 0 < limits["attention"] <= 40


def test_the_first_compilation_of_a_process_passes_under_the_projects_filters_of_warnings(tmp_path):
    (tmp_path / "test_first.py").write_text(FIRST_COMPILATION)
    options = ["-c", ROOT / "pyproject.toml", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "3 passed" in done.stdout, done.stdout
    assert 0 == done.returncode


def test_the_wheels_that_travel_have_versions_and_are_those_that_the_docs_list():
    page, count = " ".join((ROOT / "docs/gpu.md").read_text().split()), 0
    for name in ("requirements.txt", "requirements-peers.txt"):
        lines = (ROOT / "tests/gpu" / name).read_text().splitlines()
        pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
        (listed,) = re.findall(rf"- `{name}`,.*?: ([\w, -]+)[;.]", page)
        assert list(pinned) == listed.split(", ")
        count += len(pinned)
    assert f"{count} wheels" in page
    assert f"speculators {pinned['speculators']} and SpecForge {pinned['specforge']}" in page
    recipe = subprocess.run(["make", "-n", "gpu-wheels"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-r tests/gpu/requirements.txt -r tests/gpu/requirements-peers.txt" in recipe


def test_what_runs_on_a_gpu_imports_nothing_that_such_a_machine_lacks():
    tests = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if is_of_a_device(file)]
    tests = [file for file in tests if "sglang" not in file.parts]
    assert {"test_device_training.py", "test_dflash_step.py"} <= {file.name for file in tests}
    benchmark = [ROOT / "benchmarks/gpu.py", ROOT / "benchmarks/evaluate.py", *ROOT.glob("benchmarks/gpu_parts/*.py")]
    benchmark += [ROOT / "benchmarks/sides/ours.py", ROOT / "benchmarks/sides/dense.py"]
    for file in (*tests, *benchmark, ROOT / "tests/conftest.py", ROOT / "tests/ops/conftest.py"):
        assert set() == ABSENT & reached(file, in_functions=False), file
