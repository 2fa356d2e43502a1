"""A stage over several hosts, on the executor's side: gathers them, runs the ranks of host 0, and watches all.

The other hosts' side is joining.py; the files by which both communicate are in host_folder.py.
"""

from __future__ import annotations

import math
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsl.errors import StageError
from executor.launchers.forkserver_client import Child
from executor.launchers.host_folder import BEAT_S, POLL_S, SILENT_S, Beat, HostFolder, Offer, Pulse, host_log
from executor.system.slurm import Allocation

END_WITHIN_S = 15.0
FRESH_S = 5 * BEAT_S


class SeveralHosts:
    """All processes of a stage over several hosts, with the interface of a Child."""

    def __init__(
        self,
        folder: HostFolder,
        offer: Offer,
        store: Path,
        rendezvous: str,
        start: Callable[[str], Child],
        say: Callable[[str], None],
    ) -> None:
        self.names: list[str] = []
        self._lost: dict[int, str] = {}
        self._folder = folder
        self._offer = offer
        self._store = store
        self._rendezvous = rendezvous
        self._start = start
        self._say = say
        self._here: Child | None = None
        self._members: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._pulses: dict[int, Pulse] = {}
        self._ended: dict[int, int | None] = {}
        self._beat = Beat(folder.beat_path(0))
        self._srun: subprocess.Popen[bytes] | None = None

    def wait(self) -> int | None:
        """Return when no rank runs on any host: 0 where all succeeded, None where the stage was stopped before all
        hosts had joined. Raises StageError where Slurm does not start them, or rank 0 cannot listen.
        """
        try:
            self._beat.tick()
            self._folder.write_offer(self._offer)
            self._start_by_slurm()
            if not self._gather():
                return None
            endpoint = endpoint_of(self._rendezvous)
            self._folder.start([self._members[number]["id"] for number in range(1, self._offer.hosts)], endpoint)
            here = self._start_here(endpoint)
            self._watch(here)
            codes = [here.code, *self._ended.values()]
            return next((code or 1 for code in codes if code != 0), 0)
        finally:
            self._close()

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """The other hosts learn of SIGTERM from results-<attempt>/stop, which exists already."""
        if number == signal.SIGKILL:
            with suppress(OSError):  # a full disk, or the folder is gone: the ranks here are killed all the same
                self._folder.order_end("kill")
        with self._lock:
            self._is_stopping.set()
            if self._here is not None:
                self._here.signal(number, whole_group=whole_group)

    @property
    def pid(self) -> int | None:
        """Of torchrun on this host."""
        return None if self._here is None else self._here.pid

    @property
    def lost(self) -> str:
        """Which hosts left, and why; empty where none did."""
        return "; ".join(self._lost.values())

    @property
    def broken(self) -> str:
        """Hosts whose torchrun failed; of interest only where no rank reports why."""
        return "; ".join(
            f"torchrun on {self._name(number)} ended with exit code {code}; its log: {self._log(number)}"
            for number, code in self._ended.items()
            if code
        )

    def _start_by_slurm(self) -> None:
        allocation = Allocation.current()
        if allocation is not None:
            log = Path(self._offer.log)
            self._srun = allocation.start_agents(self._offer.hosts - 1, self._store, self._folder.path, log)

    def _start_here(self, endpoint: str) -> Child:
        """Start the local ranks. An earlier stop is passed on once: a second SIGTERM ends torchrun before its ranks."""
        with self._lock:
            self._here = here = self._start(endpoint)
            if self._is_stopping.is_set():
                here.signal(signal.SIGTERM)
        return here

    def _gather(self) -> bool:
        """Whether all hosts joined before a stop was requested."""
        reported = -1
        while not self._is_stopping.is_set():
            self._beat.tick()
            joined = self._joined()
            missing = self._offer.hosts - 1 - len(joined)
            if not missing:
                self._members = joined
                self.names = [socket.gethostname(), *(joined[number]["host"] for number in sorted(joined))]
                return True
            if missing != reported:
                self._say(self._waiting(missing))
                reported = missing
            if self._srun is not None and self._srun.poll() is not None:
                raise StageError(
                    f"srun ended with exit code {self._srun.returncode} before all hosts had joined; see the log"
                )
            self._is_stopping.wait(POLL_S)
        return False

    def _waiting(self, missing: int) -> str:
        text = f"waiting for {missing} of {self._offer.hosts} hosts"
        command = f"dflow agent --store {shlex.quote(str(self._store))}"
        return f"{text}, which srun starts" if self._srun is not None else f"{text}: run `{command}` there"

    def _joined(self) -> dict[int, dict[str, Any]]:
        """Hosts that joined and have a heartbeat; frees the places of those that left or died."""
        members = {}
        for number in range(1, self._offer.hosts):
            member = self._folder.member(number)
            if member is None:
                continue
            pulse = self._pulses.setdefault(number, Pulse(self._folder.beat_path(number)))
            if pulse.silence() > SILENT_S or self._folder.reported_end(number) is not None:
                del self._pulses[number]
                self._folder.dismiss(number)
            elif pulse.has_changed and pulse.silence() < FRESH_S:
                members[number] = member
        return members

    def _watch(self, here: Child) -> None:
        """Return when no host runs anything; when one fails, end the others."""
        kill_at = math.inf
        is_ending = False
        while not self._have_ended(here):
            self._beat.tick()
            failed = (here.ended_within(0) and here.code != 0) or any(code != 0 for code in self._ended.values())
            if failed and not is_ending and not self._is_stopping.is_set():
                is_ending, kill_at = True, time.monotonic() + END_WITHIN_S
                self._folder.order_end("term")
                here.signal(signal.SIGTERM)
            if time.monotonic() > kill_at:
                kill_at = math.inf
                self._folder.order_end("kill")
                here.signal(signal.SIGKILL, whole_group=True)

    def _have_ended(self, here: Child) -> bool:
        """Wait a moment, and update the state of the other hosts."""
        is_over = here.ended_within(POLL_S)
        if is_over:
            time.sleep(POLL_S)
        for number in range(1, self._offer.hosts):
            if number not in self._ended:
                self._update(number)
        return is_over and len(self._ended) == self._offer.hosts - 1

    def _update(self, number: int) -> None:
        end, name = self._folder.reported_end(number), self._name(number)
        if end is not None:
            self._ended[number] = end["code"]
            if end["why"]:
                self._lost[number] = f"{name}: {end['why']}"
        elif self._pulses[number].silence() > SILENT_S:
            self._ended[number] = None
            self._lost[number] = (
                f"{name}: its agent has been silent for {SILENT_S:g} s; it was killed, or the host is gone"
            )
            self._folder.report_end(number, None, "silent")

    def _name(self, number: int) -> str:
        return f"host {number} ({self.names[number]})"

    def _log(self, number: int) -> Path:
        return host_log(Path(self._offer.log), number)

    def _close(self) -> None:
        """Order whatever still runs elsewhere, such as an agent that joined too late, to end."""
        self._folder.order_end("kill")
        if self._srun is not None:
            try:
                self._srun.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._srun.kill()
                self._srun.wait()


def endpoint_of(rendezvous: str) -> str:
    """Where rank 0 will listen: as given, else this host's name and a free port. Raises StageError for a used address
    or one of another machine.
    """
    host, _, port = rendezvous.rpartition(":")
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((name, int(port or 0)))
        except OSError as error:
            raise StageError(
                f'launch.rendezvous = "{rendezvous}": {error.strerror}; it must be an address of this machine, '
                f"{socket.gethostname()}, where rank 0 runs, and a free port"
            ) from error
        return rendezvous or f"{socket.gethostname()}:{probe.getsockname()[1]}"


def wait_for_hosts(work_folder: Path) -> None:
    """Return when no host of an earlier attempt runs anything: it reported its end, or has been silent for SILENT_S.

    Needs no locks between hosts. Their agents notice the new token of the lease.
    """
    members = [
        (HostFolder(path.parent), int(path.stem))
        for path in work_folder.glob("hosts-*/*.json")
        if path.stem.isdecimal()
    ]
    pulses = {place: Pulse(folder.beat_path(number)) for place, (folder, number) in enumerate(members)}
    while pulses:
        for place in list(pulses):
            folder, number = members[place]
            if folder.reported_end(number) is not None or pulses[place].silence() > SILENT_S:
                del pulses[place]
        if pulses:
            time.sleep(POLL_S)
