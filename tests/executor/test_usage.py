"""What a running node uses of this machine."""

import os
import queue
import subprocess
import sys

from executor.usage import Usage, Watched, read_processes


def test_a_young_node_is_looked_at_soon_and_an_old_one_every_ten_seconds() -> None:
    watched = Watched("a", 1, None, since=0.0)
    now, pauses = 0.0, []
    for _ in range(7):
        pauses.append(watched.pause)
        assert not watched.is_due(now + watched.pause - 0.01)
        now += watched.pause
        assert watched.is_due(now)
        watched.looked(now, {})
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
