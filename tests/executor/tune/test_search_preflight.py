"""What `dflow plan` and `dflow tune` refuse of a search before anything is captured or trained."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsl.errors import PipelineError
from executor.records.run_record import NodeState, Record
from executor.store.artifact_store import Store
from executor.tune.preflight import Pace, announcement, pace_of, search_preflight
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
    assert "4 trials, compared at steps 3, 500; one in 2 goes on: at most 1,006 training steps in 6 trainings" in said
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


def test_values_that_change_nothing_of_the_training_are_refused_by_their_name(tmp_path: Path) -> None:
    file = written(tmp_path, "[3, 6]", "train.lr = [1e-5, 3e-3]\neval.max_new_tokens = [8, 16]")
    with pytest.raises(PipelineError) as found:
        read_trials(file)
    (mistake,) = found.value.mistakes
    assert f'{file}:12:6: tune.space.eval.max_new_tokens: "eval" is not above "train"' in str(mistake)


def test_disk_is_that_of_the_trainings_that_run_whichever_trials_stop(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path, "[3, 6]", "train.intermediate_size = [64, 10_000_000_000_000]"))
    (only,) = search_preflight(Store(tmp_path / "runs"), trials).refused
    assert "node.train" == only.path
    assert "of disk" in only.what and only.what.endswith("(t02)")


def test_without_a_training_no_time_is_announced(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path, "[3, 6]"))
    assert pace_of(Store(tmp_path / "runs"), trials) is None
    assert announcement(trials, None).endswith(
        "at most 9 training steps in 3 trainings; how long they take is known once one is trained"
    )
    assert "3 trainings; 1 min 36 s of all trainings together" in announcement(trials, Pace(start=2.0, step=10.0))


def test_the_time_of_a_search_counts_what_each_training_takes_beside_its_steps(tmp_path: Path) -> None:
    trials = read_trials(written(tmp_path, "[3, 6]"))
    store = Store.open(tmp_path / "runs", write=True)

    def trained(node_id: str, seconds: float, steps: int, step_seconds: float, measuring: float) -> None:
        """A run that trained a node: its record, and the measurements of its artifact."""
        digest = hashlib.sha256(node_id.encode()).hexdigest()
        folder = store.object_path(digest)
        folder.mkdir(parents=True)
        figures = {"steps_in_this_attempt": steps, "step_seconds": step_seconds, "measuring_seconds": measuring}
        (folder / "measurements.json").write_text(json.dumps(figures))
        graph = trials.graph.up_to([node_id])
        states = {each: NodeState() for each in graph.nodes}
        states[node_id] = NodeState(state="done", digest=digest, seconds=seconds)
        Record.prepare(store.records, graph, nodes=states).save_all()

    trained("train_3-t01", 20.0, 3, 2.0, 3.0)  # 11 s beside steps of 2 s, and 3 s of measuring
    assert Pace(start=11.0, step=3.0) == pace_of(store, trials)
    trained("train_6-t02", 16.0, 3, 4.0, 3.0)  # 1 s, 4 s, 3 s
    pace = pace_of(store, trials)
    assert Pace(start=6.0, step=4.0) == pace
    assert pace.seconds(trials) == 3 * 6.0 + (2 * 3 + 3) * 4.0
