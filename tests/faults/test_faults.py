"""Kill -9 at every named place of the commit protocol and of the lease, and at random moments; then resume."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_trial import Kill, Undisturbed, kills, phases, tried, undisturbed
from toy_ops import ONE_NODE, Toy

from executor.fail_points import FAIL_AT

SEED = int(os.environ.get("DFLOW_FAULT_SEED", "7"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "trial")


def test_a_tenth_of_the_kills_leaves_what_an_undisturbed_run_does(tmp_path, reference):
    all_as_undisturbed(tmp_path, reference, kills(1, 10, SEED))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kill_leaves_what_an_undisturbed_run_does(tmp_path, reference):
    all_as_undisturbed(tmp_path, reference, kills(10, 100, SEED))


def all_as_undisturbed(folder: Path, reference: Undisturbed, chosen: list[Kill]) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        trials = [pool.submit(told, folder / str(number), kill, reference) for number, kill in enumerate(chosen)]
        wrong = [text for trial in trials if (text := trial.result())]
    print(f"\nseed {SEED}; kills by phase:")
    for phase, count in phases(chosen).items():
        print(f"{count:5}  {phase}")
    assert [] == wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)


def told(folder: Path, kill: Kill, reference: Undisturbed) -> str:
    """What went wrong in a trial, an empty string where nothing did."""
    try:
        tried(folder, kill, reference)
    except (AssertionError, OSError) as error:
        return f"{kill}: {error} (see {folder})"
    return ""


@pytest.mark.parametrize(
    "place",
    [
        *("commit:waited", "commit:hashed", "commit:manifest", "commit:synced"),
        *("commit:placing", "commit:renamed", "commit:placed", "commit:indexed", "run:committed"),
    ],
)
def test_a_stage_that_has_ended_is_not_run_again_because_its_commit_was_cut_off(tmp_path, place):
    toy = Toy(tmp_path, ONE_NODE)
    assert -signal.SIGKILL == toy.dflow("run", str(toy.file), **{FAIL_AT: place}).returncode
    assert 0 == toy.dflow("resume").returncode
    assert (["make"], "hello", {"make/length": 5.0}) == (
        toy.calls(),
        toy.text("a"),
        toy.state()["nodes"]["a"]["metrics"],
    )
