"""The ranks of a stage on one host: started, watched and ended together, without a network.

    python -m executor.launchers.ranks <exits> <store> <ranks> <job>          (the forkserver starts it)

Each rank is a `python -m executor.launchers.worker <job>`; its environment has its number, in the variables
of torchrun; it ends with this process. No port is opened here: the rendezvous of the ranks is a file,
<store>, in a folder that only this user may enter. Ports of gloo and nccl stay on the loopback interface.

When a rank has failed, the others get SIGTERM at once, and SIGKILL 30 s later: `executor.launchers.worker` ends them
earlier. A signal to this process is passed on to all ranks, once. Failed ranks are written to a file, <exits>, see
stage_contract.py.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from dsl.stage import LOOPBACK_ONLY, RENDEZVOUS
from executor.launchers.stage_contract import RankExit, write_exits
from executor.launchers.worker import AGENT, ENDING
from executor.system.supervisor import exit_text, module_command

FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT)
KILL_AFTER_S = 30.0
# Another rendezvous in the user's environment: of hosts, or of ranks started by something else.
OTHER_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


@frozen
class Rank:
    """descriptor: a pidfd, readable once the process has ended."""

    number: int
    process: subprocess.Popen[bytes]
    descriptor: int


def main() -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked by the forkserver; no rank runs yet
    exits, store, count, job = sys.argv[1:]
    woken = _wake_up_on(FORWARDED)
    environment = {name: value for name, value in os.environ.items() if name not in OTHER_RENDEZVOUS}
    ranks = [_start(rank, int(count), job, {**environment, RENDEZVOUS: store}) for rank in range(int(count))]
    ended_badly = Watch(ranks, woken).until_all_ended()
    if ended_badly:
        write_exits(Path(exits), ended_badly)
    return 1 if ended_badly else 0


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """The variables that number a rank, and keep its communication on the loopback interface."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        **LOOPBACK_ONLY,
        "NCCL_RAS_ENABLE": os.environ.get("NCCL_RAS_ENABLE", "0"),  # it would listen for queries from anybody
        # As torchrun sets it: a rank whose collective fails is torn down, with its connections to the others.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _start(rank: int, ranks: int, job: str, environment: Mapping[str, str]) -> Rank:
    process = subprocess.Popen(
        module_command("executor.launchers.worker", job),
        env={**environment, AGENT: str(os.getpid()), **rank_environment(rank, ranks)},
        start_new_session=True,  # its own scheduling group, and a process group to signal
    )
    return Rank(rank, process, os.pidfd_open(process.pid))


def _wake_up_on(numbers: tuple[signal.Signals, ...]) -> int:
    """A descriptor that yields the numbers of these signals, which then have no other effect."""
    woken, wake_up = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)  # without a handler the descriptor does not get the number
    return woken


class Watch:
    """Watches the ranks until none runs."""

    def __init__(self, ranks: list[Rank], woken: int) -> None:
        self._woken = woken
        self._running = {rank.number: rank for rank in ranks}
        self._ended_badly: list[RankExit] = []
        self._is_ending = False
        self._kill_at: float | None = None  # monotonic; set once ranks were signalled to end
        self._selector = selectors.DefaultSelector()
        self._selector.register(woken, selectors.EVENT_READ)
        for rank in ranks:
            self._selector.register(rank.descriptor, selectors.EVENT_READ, rank)

    def until_all_ended(self) -> list[RankExit]:
        """The failed ranks, for <exits>."""
        while self._running:
            for key, _ in self._selector.select(self._time_left()):
                if key.data is None:
                    self._request_end(os.read(self._woken, 1)[0])
                else:
                    self._note_end(key.data)
            if self._ended_badly:
                self._request_end(signal.SIGTERM)
            if self._time_left() == 0.0:
                self._kill_at = None  # once, also for a rank that the kernel ends only later
                self._send(signal.SIGKILL)
        return self._ended_badly

    def _time_left(self) -> float | None:
        """Seconds until the remaining ranks are killed, None where none has to end, or all were killed."""
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _note_end(self, rank: Rank) -> None:
        code = rank.process.wait()
        self._selector.unregister(rank.descriptor)
        os.close(rank.descriptor)
        del self._running[rank.number]
        if code:
            self._ended_badly.append(RankExit(rank.number, code, time.time()))
            with suppress(OSError):  # a full disk must not keep the others from ending
                print(f"rank {rank.number} (process {rank.process.pid}) {exit_text(code)}", file=sys.stderr, flush=True)

    def _request_end(self, number: int) -> None:
        """Send the signal once: a rank that received it may be saving a checkpoint."""
        if not self._is_ending:
            self._is_ending = True
            self._kill_at = time.monotonic() + KILL_AFTER_S
            self._send(number)

    def _send(self, number: int) -> None:
        """To the whole group of each rank. A rank that was not waited for still owns its process group."""
        for rank in self._running.values():
            os.killpg(rank.process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
