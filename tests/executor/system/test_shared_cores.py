"""Runs at once on one machine hold no more than its CPUs together, except for the one stage that each always has."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.system import shared_cores
from executor.system.shared_cores import SharedCores


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Four CPUs, and nobody else's runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(shared_cores, "YIELDS_S", 0.0)


def claims(folder):
    return sorted(path.name for path in (folder / "dflow" / "cores").iterdir() if path.name != "lock")


def test_a_run_always_gets_one_stage_and_another_one_only_where_all_fit():
    first, second = SharedCores(4), SharedCores(4)
    assert ["", "", ""] == [first.take(1), first.take(2), second.take(4)]
    full = "other runs on this machine use {} of 4 CPUs"
    assert [full.format(4), full.format(3)] == [first.take(1), second.take(1)]
    second.give_back(4, was_used=True)
    assert ["", ""] == [first.take(1), second.take(1)]


def test_a_run_that_is_gone_holds_nothing_and_leaves_nothing(tmp_path):
    first, second = SharedCores(4), SharedCores(4)
    assert ["", ""] == [first.take(4), second.take(1)]
    assert second.take(1)
    os.close(first._file[1])  # as the system does for a process that is killed
    assert "" == second.take(1)
    assert 1 == len(claims(tmp_path))
    second.close()
    assert [] == claims(tmp_path)


def test_runs_on_other_cpus_do_not_count(monkeypatch):
    first = SharedCores(4)
    assert "" == first.take(4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5})
    second = SharedCores(2)
    assert ["", ""] == [second.take(1), second.take(1)]


def test_a_run_may_use_more_cpus_than_exist_where_it_is_by_itself():
    first, second = SharedCores(9), SharedCores(4)
    assert [""] * 9 == [first.take(1) for _ in range(9)]
    assert ["", "other runs on this machine use 9 of 4 CPUs"] == [second.take(1), second.take(1)]


def test_without_a_folder_for_claims_a_run_goes_on_as_if_by_itself(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    runs = [SharedCores(2), SharedCores(2)]
    assert [""] * 4 == [run.take(1) for run in runs * 2]


def test_a_run_of_which_a_stage_has_just_ended_lets_others_go_first(monkeypatch):
    monkeypatch.setattr(shared_cores, "YIELDS_S", 3600.0)
    first, second = SharedCores(4), SharedCores(4)
    assert [""] * 4 == [first.take(1), first.take(1), first.take(1), second.take(1)]
    first.give_back(1, was_used=True)
    assert ["other runs on this machine go first", ""] == [first.take(1), second.take(1)]
    second.give_back(1, was_used=False)  # it did not start
    assert "" == second.take(1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=30))
def test_whatever_order_stages_start_and_end_in_a_further_one_never_exceeds_the_machine(steps):
    runs = [SharedCores(4) for _ in range(3)]
    held: list[list[int]] = [[], [], []]
    for number, cpus, ends in steps:
        if ends and held[number]:
            runs[number].give_back(held[number].pop(), was_used=True)
            continue
        others = sum(map(sum, held))
        fits = not held[number] or others + cpus <= 4 or others == sum(held[number])
        assert fits == (runs[number].take(cpus) == "")
        if fits:
            held[number].append(cpus)
    for run in runs:
        run.close()
