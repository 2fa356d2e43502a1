"""Claims of workers: one owner each, passed on if it is lost; a file is published once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_stage import FakeStage

from dsl.errors import StopRequested
from ops.lib.data import shared_shards
from ops.lib.data.shared_shards import SharedShards, partial_path, publish, published_rows, waited

NAMES = [f"{number:08d}-{number + 1:08d}.shard" for number in range(6)]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(shared_shards, "POLL_S", 0.001)


def worker(folder, number, workers=3, **options):
    return SharedShards(FakeStage(folder, worker=number, workers=workers, **options))


def claimed(shared, names=NAMES):
    return shared.claimed(lambda: names, lambda name: shared.stage.work_dir / name)


def make(shared, name):
    partial = partial_path(shared.stage.work_dir / name, shared.stage.worker)
    partial.write_text(str(shared.stage.worker))
    publish(partial, shared.stage.work_dir / name)


def test_workers_side_by_side_make_every_shard_once(tmp_path):
    def work(number):
        shared, made = worker(tmp_path, number), []
        for name in waited(claimed(shared), lambda: False):
            make(shared, name)
            made.append(name)
        return made

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(work, range(3)))
    assert NAMES == sorted(name for each in made for name in each)
    assert len(NAMES) == published_rows(tmp_path / "work", ".shard")


def test_a_shard_of_a_living_worker_is_waited_for_and_that_of_a_lost_one_is_made_again(tmp_path):
    first, second = worker(tmp_path, 0), worker(tmp_path, 1)
    lost, other = claimed(first), claimed(second, NAMES[:2])
    assert NAMES[0] == next(lost)
    assert NAMES[1] == next(other)
    make(second, NAMES[1])
    assert [None, None] == [next(other), next(other)]
    (tmp_path / "lost-0").touch()
    assert NAMES[0] == next(other)
    assert not worker(tmp_path, 2)._claim(NAMES[0])  # the next claim is the second worker's
    make(second, NAMES[0])
    assert [] == list(other)
    assert ["0", "1"] == [str((tmp_path / "shared" / f"{NAMES[0]}.{claim}").readlink()) for claim in (0, 1)]


def test_a_shard_that_is_still_being_written_is_not_given_to_its_worker_again(tmp_path):
    shared = worker(tmp_path, 0)
    mine = claimed(shared, NAMES[:1])
    assert [NAMES[0], None, None] == [next(mine), next(mine), next(mine)]
    make(shared, NAMES[0])
    assert [] == list(mine)


def test_the_first_published_file_counts(tmp_path):
    first, second = worker(tmp_path, 0), worker(tmp_path, 1)
    make(first, NAMES[0])
    make(second, NAMES[0])
    assert "0" == (tmp_path / "work" / NAMES[0]).read_text()
    assert [NAMES[0]] == [file.name for file in (tmp_path / "work").iterdir()]


def test_without_hard_links_a_file_is_renamed(tmp_path, monkeypatch):
    def no_links(*given):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    for number in (0, 1):
        make(worker(tmp_path, number), NAMES[0])
    assert "0" == (tmp_path / "work" / NAMES[0]).read_text()
    assert [NAMES[0]] == [file.name for file in (tmp_path / "work").iterdir()]


def test_one_worker_writes_the_artifact_and_a_lost_writers_files_are_removed(tmp_path):
    writers = []

    def write(shared):
        writers.append(shared.stage.worker)
        assert [] == list(shared.stage.out_dir.iterdir())

    first, second, third = (worker(tmp_path, number, stop_after=3) for number in range(3))
    assert first._claim("artifact")
    (first.stage.out_dir / "processor").mkdir()
    (first.stage.out_dir / "processor" / "half").touch()
    with pytest.raises(StopRequested, match="waiting for other workers"):
        second.write_artifact(lambda: write(second))
    (tmp_path / "lost-0").touch()
    second.write_artifact(lambda: write(second))
    third.write_artifact(lambda: write(third))
    assert [1] == writers


def test_values_are_waited_for_from_workers_that_began_and_are_not_lost(tmp_path):
    first, second = worker(tmp_path, 0, stop_after=0), worker(tmp_path, 1)
    first.give("figures", 1)  # the third never begins
    with pytest.raises(StopRequested):
        first.given("figures")
    (tmp_path / "lost-1").touch()
    assert [1] == first.given("figures")
    second.give("figures", 2)
    assert [1, 2] == first.given("figures")


def test_only_a_workers_own_unfinished_files_and_those_of_workers_no_longer_there_are_removed(tmp_path):
    FakeStage(tmp_path)
    for number in (0, 1, 7):
        partial_path(tmp_path / "work" / NAMES[number % 6], number).touch()
    worker(tmp_path, 0)
    assert [partial_path(tmp_path / "work" / NAMES[1], 1)] == list((tmp_path / "work").iterdir())
