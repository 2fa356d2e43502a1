"""Kill -9 at every named place of the commit protocol and of the lease, and at random moments; then resume."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_trial import PLACES, VICTIMS, Kill, Undisturbed, every_kill, few_kills, tried, undisturbed
from toy_ops import ONE_NODE, Toy

from executor.system.crash_points import FAIL_AT

SEED = int(os.environ.get("DFLOW_FAULT_SEED", "7"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "trial")


def test_a_part_of_the_kills_leaves_what_an_undisturbed_run_does(tmp_path, reference):
    all_as_undisturbed(tmp_path, reference, few_kills(SEED))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kill_leaves_what_an_undisturbed_run_does(tmp_path, reference):
    all_as_undisturbed(tmp_path, reference, every_kill(SEED))


def all_as_undisturbed(folder: Path, reference: Undisturbed, chosen: list[Kill]) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        trials = [pool.submit(told, folder / str(number), kill, reference) for number, kill in enumerate(chosen)]
        ended = [trial.result() for trial in trials]
    print(f"\nseed {SEED}; kills by phase:")
    for phase, count in Counter(phase for phase, _ in ended).items():
        print(f"{count:5}  {phase}")
    wrong = [text for _, text in ended if text]
    assert [] == wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)


def told(folder: Path, kill: Kill, reference: Undisturbed) -> tuple[str, str]:
    """Run one trial. Returns its phase and what went wrong, an empty string where nothing did."""
    try:
        return tried(folder, kill, reference), ""
    except (AssertionError, OSError) as error:
        return kill.phase, f"{kill}: {error} (see {folder})"


def test_the_whole_kills_every_victim_at_every_place_ten_times_and_at_random_moments():
    count = Counter(kill.phase for kill in every_kill(SEED) if kill.place)
    assert {10} == set(count.values())
    victims = {place: {"executor"} if place.startswith("gc:") else set(VICTIMS) for place in PLACES}
    assert {f"{place}, {victim}" for place in PLACES for victim in victims[place]} == set(count)
    assert 100 == sum(not kill.place for kill in every_kill(SEED))
    assert set(PLACES) == {kill.place for kill in few_kills(SEED)} - {""}


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
