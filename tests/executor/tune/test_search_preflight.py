"""What `dflow plan` and `dflow tune` refuse of a search before anything is captured or trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from executor.store.artifact_store import Store
from executor.tune.preflight import announcement, search_preflight, step_seconds
from executor.tune.trials import read_trials

TINY = Path(__file__).resolve().parents[3] / "pipelines" / "tiny.toml"


def written(folder: Path, rungs: str, space: str = "train.lr = [1e-5, 3e-3]") -> Path:
    file = folder / "tuned.toml"
    training = "[mlflow]\ntracking = false\n[node.train]\neval_every = 4\n[node.ingest]\nmax_samples = 16"
    file.write_text(f'extends = "{TINY}"\n{training}\n[tune]\nrungs = {rungs}\n[tune.space]\n{space}\n')
    return file


def dflow(folder: Path, command: str, *more: str) -> tuple[int, str]:
    given = [sys.executable, "-m", "executor.cli", command, str(folder / "tuned.toml"), *more]
    done = subprocess.run([*given, "--store", str(folder / "runs")], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_rungs_beyond_the_steps_are_refused_once_the_samples_are_tokenised_before_any_capture(tmp_path: Path) -> None:
    file = written(tmp_path, "[3, 500]", "train.lr = [1e-5, 3e-3]\nshard.epochs = [1, 2]")
    code, said = dflow(tmp_path, "plan")
    assert 0 == code
    assert "4 trials, compared at steps 3, 500; one in 2 goes on: at most 1,006 training steps" in said
    assert "once there is tokenize" in said
    code, said = dflow(tmp_path, "tune")
    (plan,) = (json.loads(path.read_text()) for path in (tmp_path / "runs" / "records").glob("*/plan.json"))
    assert ["ingest", "inject", "tokenize"] == list(plan)
    refused = [line for line in said.splitlines() if "tune.rungs" in line]
    assert 2 == len(refused)
    planned, found = dflow(tmp_path, "plan", "--json")
    assert (code, planned) == (2, 2)
    plan = json.loads(found)
    assert [] == plan["missing_here"]
    assert refused == plan["tune"]["refused"]
    many, few = (int(line.partition("more than the ")[2].partition(" steps")[0]) for line in sorted(refused)[::-1])
    assert many == 2 * few
    assert f"{file}:9:1: tune.rungs: 500 is more than the {few} steps of the training: lower it (t01, t03)" in refused
    written(tmp_path, f"[3, {few}]", "train.lr = [1e-5, 3e-3]\nshard.epochs = [1, 2]")
    assert 0 == dflow(tmp_path, "plan")[0]
    assert (0, True) == ((result := dflow(tmp_path, "plan", "-s", "train.lr=1e-4"))[0], "dflow tune" not in result[1])


def test_what_every_trial_lacks_is_named_once_and_that_of_some_with_their_names(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path, "[3, 6]", "train.num_heads = [4, 3]\ntrain.mask_token_id = [10_000_000]"))
    found = search_preflight(Store(tmp_path / "runs"), trials).refused
    assert 1 == sum(each.path == "node.train.mask_token_id" and "(t0" not in each.what for each in found)
    assert [True] == [each.what.endswith("(t02)") for each in found if each.path == "node.train.num_heads"]


def test_disk_is_that_of_the_trainings_that_run_whichever_trials_stop(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path, "[3, 6]", "train.intermediate_size = [64, 10_000_000_000_000]"))
    (only,) = search_preflight(Store(tmp_path / "runs"), trials).refused
    assert "node.train" == only.path
    assert "of disk" in only.what and only.what.endswith("(t02)")


def test_without_a_trained_step_no_time_is_announced(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path, "[3, 6]"))
    assert step_seconds(Store(tmp_path / "runs"), trials) is None
    assert "at most 9 training steps" in announcement(trials, None)
    assert announcement(trials, 10.0).endswith("at most 9 training steps, 1 min 30 s at 10 s a step without measuring")
