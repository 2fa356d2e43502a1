"""The parent of the ranks on one host: what it does when one ends badly, and with signals."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import attrs
import pytest

from dsl.stage import PoolRendezvous
from executor.launchers import rank_processes
from executor.launchers.rank_processes import PoolProcesses, Rank, Watch


@pytest.fixture
def wake():
    """A pipe: what reads the numbers of signals, and where a test writes them."""
    ends = os.pipe2(os.O_NONBLOCK)
    yield ends
    for end in ends:
        os.close(end)


def shell(number: int, script: str) -> Rank:
    """A rank that has begun, so that its traps are set; bash sets none for a signal that is ignored when it begins."""
    command = ["env", "--default-signal=INT", "bash", "-c", script.replace("READY", "echo ready")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert b"ready\n" == process.stdout.readline()
    return Rank(number, process, os.pidfd_open(process.pid))


def rest(rank: Rank) -> bytes:
    """The output of a rank after it had begun."""
    assert rank.process.stdout is not None
    with rank.process.stdout as said:
        return said.read()


def test_a_rank_that_ignores_being_asked_to_end_is_killed_a_while_later(wake, monkeypatch):
    monkeypatch.setattr(rank_processes, "KILL_AFTER_S", 0.5)
    deaf = shell(0, 'trap "" TERM; READY; while true; do sleep 0.05; done')
    broken = shell(1, "READY; exit 3")
    ended = Watch([deaf, broken], wake[0]).until_all_ended()
    assert [(1, 3), (0, -signal.SIGKILL)] == [(end.rank, end.code) for end in ended]
    assert 0.5 <= ended[1].time - ended[0].time
    assert [b"", b""] == [rest(deaf), rest(broken)]


def test_the_others_are_asked_to_end_as_soon_as_one_has_failed(wake):
    other = shell(0, 'trap "echo asked; exit 0" TERM; READY; while true; do sleep 0.05; done')
    broken = shell(1, "READY; kill -SEGV $$")
    assert [(1, -signal.SIGSEGV)] == [(end.rank, end.code) for end in Watch([other, broken], wake[0]).until_all_ended()]
    assert (b"asked\n", b"") == (rest(other), rest(broken))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_every_rank_and_the_next_ones_are_not(wake, number):
    script = 'trap "echo asked; n=1" TERM INT; READY; until [ "$n" ]; do sleep 0.1; done; sleep 0.5; exit 0'
    both = [shell(rank, script) for rank in range(2)]
    os.write(wake[1], bytes([number, number, signal.SIGTERM]))
    assert [] == Watch(both, wake[0]).until_all_ended()
    assert [b"asked\n"] * 2 == [rest(rank) for rank in both]


def test_a_rank_that_the_kernel_lets_end_late_is_killed_once_and_waited_for_without_spinning(wake, monkeypatch):
    """One that waits for a broken disk, say: SIGKILL has no effect before that is over."""
    monkeypatch.setattr(rank_processes, "KILL_AFTER_S", 0.2)
    sent, kill_group = [], os.killpg

    def later(group: int, number: int) -> None:
        sent.append(number)
        if sent == [signal.SIGTERM, signal.SIGKILL]:
            threading.Timer(0.5, kill_group, (group, number)).start()

    monkeypatch.setattr(os, "killpg", later)
    deaf = shell(0, "READY; sleep 100")
    os.write(wake[1], bytes([signal.SIGTERM]))
    begin = time.thread_time()
    assert [(0, -signal.SIGKILL)] == [(end.rank, end.code) for end in Watch([deaf], wake[0]).until_all_ended()]
    assert time.thread_time() - begin < 0.2
    assert ([signal.SIGTERM, signal.SIGKILL], b"") == (sent, rest(deaf))


class Pool(PoolProcesses):
    """A pool of one worker, which runs a script."""

    def __init__(self, folder: Path, script: str) -> None:
        place = PoolRendezvous(workers=1, folder=folder, private=folder, secret="")
        super().__init__(place, argparse.Namespace(total=1, pool_starts=1), {})
        self.worker = attrs.evolve(shell(1, script), worker=0)

    def start(self, worker: int) -> Rank:
        self.starts[worker] = 1
        return self.worker


@pytest.mark.parametrize(
    ("seconds", "trap", "code"), [(600.0, "echo asked; exit 0", 0), (0.2, "", -signal.SIGKILL)], ids=["ends", "is deaf"]
)
def test_a_worker_of_a_pool_is_asked_to_end_with_the_last_rank_and_killed_a_while_later(
    wake, monkeypatch, tmp_path, seconds, trap, code
):
    monkeypatch.setattr(rank_processes, "END_POOL_WITHIN_S", seconds)
    pool = Pool(tmp_path, f'trap "{trap}" TERM; READY; while true; do sleep 0.05; done')
    last = shell(0, "READY; exit 0")
    assert [] == Watch([last], wake[0], pool=pool).until_all_ended()
    assert (code, b"asked\n" if trap else b"", b"") == (pool.worker.process.returncode, rest(pool.worker), rest(last))


def test_a_rank_knows_its_place_and_talks_over_the_loopback_interface_alone(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    environment = rank_processes.rank_environment(2, 4)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert ["2", "2", "4", "4", "lo", "=lo"] == [environment[name] for name in names]
    assert "0" == environment["TORCH_GLOO_LAZY_INIT"]


def test_nccls_thread_for_questions_listens_only_where_the_user_wants_it(monkeypatch):
    monkeypatch.delenv("NCCL_RAS_ENABLE", raising=False)
    assert "0" == rank_processes.rank_environment(0, 2)["NCCL_RAS_ENABLE"]
    monkeypatch.setenv("NCCL_RAS_ENABLE", "1")
    assert "1" == rank_processes.rank_environment(0, 2)["NCCL_RAS_ENABLE"]
