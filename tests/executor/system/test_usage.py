"""What a running node uses of this machine."""

import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from executor.system import system_metrics
from executor.system.system_metrics import TICKS_A_SECOND, Process, Usage, Watched, read_processes


def test_a_young_node_is_looked_at_soon_and_an_old_one_every_ten_seconds() -> None:
    watched = Watched("a", 1, None, since=0.0)
    now, pauses = 0.0, []
    for _ in range(7):
        pauses.append(watched.pause)
        assert not watched.is_due(now + watched.pause - 0.01)
        now += watched.pause
        assert watched.is_due(now)
        watched.looked(now, {}, 0.0)
    assert [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0] == pauses


def test_the_first_look_tells_the_cpu_time_since_the_process_began() -> None:
    told: queue.Queue[tuple[str, dict[str, float]]] = queue.Queue()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        usage = Usage(lambda: [("a", busy.pid, [])], lambda node, metrics: told.put((node, dict(metrics))))
        usage.start()
        try:
            node, metrics = told.get(timeout=60)
        finally:
            usage.close()
            busy.kill()
    assert ("a", {"memory_usage_megabytes", "cpu_utilization_percentage"}) == (node, set(metrics))
    assert metrics["memory_usage_megabytes"] > 1
    assert 0 < metrics["cpu_utilization_percentage"] < 200


def test_the_age_of_a_process_is_that_since_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as young:
        processes = read_processes()
        young.kill()
    assert -0.1 < processes[young.pid].age < processes[os.getpid()].age


def test_a_process_is_as_old_as_when_its_cpu_time_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, read = [1e9], Path.read_text

    def stalls(path: Path, **how: str) -> str:
        clock[0] += 100.0
        return read(path, **how)

    monkeypatch.setattr(system_metrics.time, "clock_gettime", lambda clock_id: clock[0])
    before = read_processes()[os.getpid()].age
    monkeypatch.setattr(Path, "read_text", stalls)
    assert read_processes()[os.getpid()].age >= before + 100.0


def test_the_cpu_time_between_two_looks_is_told_of_the_time_between_them() -> None:
    looks = Usage(list, lambda node, metrics: None)
    watched = Watched("a", 7, [])
    for age, seconds_used, expected in ((2.0, 1.0, 50.0), (6.0, 9.0, 200.0)):
        ticks = round(seconds_used * TICKS_A_SECOND)
        metrics = looks._metrics(watched, {7: Process(1, ticks, 0, age)})
        assert expected == pytest.approx(metrics["cpu_utilization_percentage"])


def test_a_node_whose_processes_have_just_ended_uses_no_memory_that_is_told() -> None:
    looks = Usage(list, lambda node, metrics: None)
    assert {} == looks._metrics(Watched("a", 7, []), {})
    assert "memory_usage_megabytes" not in looks._metrics(Watched("a", 7, []), {7: Process(1, 0, 0, 1.0)})
