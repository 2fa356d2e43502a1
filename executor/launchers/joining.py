"""A stage of another host's executor, on the agent's side: joins, runs this host's ranks, and ends them.

The ranks' life line is a FIFO on this host with the agent as only writer. The agent itself watches the executor's
heartbeat in the store, and that the lease is still the one that the stage was started under.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from dsl.errors import DflowError, StageError, StoreError
from dsl.graph_json import node_from_json
from dsl.secrets import secret_values
from executor.launchers.forkserver_client import Child, Children
from executor.launchers.host_folder import (
    POLL_S,
    SILENT_S,
    Beat,
    HostFolder,
    Offer,
    Pulse,
    host_log,
    torchrun_arguments,
)
from executor.launchers.redaction import RedactedLog
from executor.launchers.stage_contract import STOP_REQUESTED, StageSpec
from executor.launchers.stage_process import stage_environment
from executor.system.jsonlines import read_object
from executor.system.resource_pool import devices
from executor.system.stage_mark import STAGE, stage_mark
from executor.system.symlinks import is_folder

RANKS_END_WITHIN_S = 10.0


class Offers:
    """The stages in a store that currently need hosts."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._pulses: dict[Path, Pulse] = {}

    def find(self, refused: Container[Path]) -> HostFolder | None:
        """A stage with a free place, whose executor has a heartbeat."""
        paths = sorted(self._offered())
        self._pulses = {path: self._pulses.get(path) or Pulse(HostFolder(path).beat_path(0)) for path in paths}
        for path, pulse in self._pulses.items():
            if path in refused:
                continue
            folder = HostFolder(path)
            pulse.silence()
            is_open = pulse.has_changed and folder.started() is None and not folder.ordered_end()
            offer = folder.offer() if is_open else None
            if offer is not None and any(folder.member(number) is None for number in range(1, offer.hosts)):
                return folder
        return None

    def _offered(self) -> Iterator[Path]:
        for work_folder in filter(is_folder, self._work.glob("*")):
            with suppress(FileNotFoundError):  # a commit has just removed it
                yield from (path.parent for path in work_folder.glob("hosts-*/offer.json"))


class Member:
    """This host's part of a stage. leaving: number of stop requests to the agent; a second one kills the ranks."""

    def __init__(self, folder: HostFolder, offer: Offer, number: int, own_id: str, leaving: Callable[[], int]) -> None:
        self._folder = folder
        self._offer = offer
        self._number = number
        self._id = own_id
        self._leaving = leaving
        self.is_stopping = False  # the run was stopped, or another host failed
        self._executor = Pulse(folder.beat_path(0))
        self._beat = Beat(folder.beat_path(number))
        spec = StageSpec.read(Path(offer.job))
        if spec is None:
            raise StageError("the stage is gone")
        self._spec = spec
        if spec.folder != folder.work_folder:
            raise StageError(
                f"the store must have the same path on all hosts: the stage's work folder is {spec.folder} on "
                f"{offer.executor} and {folder.work_folder} here"
            )

    def run(self, started: Callable[[Path], None]) -> tuple[int | None, str]:
        """The exit code of this host's torchrun, None where none was started, and why it was killed, if it was.

        started: called with the path of the log when the ranks start.
        """
        code, why = None, ""
        try:
            why, endpoint = self._wait_for_start()
            if not why:
                code, why = self._run_ranks(endpoint, started)
        except (DflowError, OSError) as error:
            why = f"{type(error).__name__}: {error}" if self._folder.path.exists() else "the stage is over"
        finally:
            try:
                self._folder.report_end(self._number, code, why)
            except StoreError:
                if self._folder.path.exists():  # else nobody reads it
                    raise
        return code, why

    def _wait_for_start(self) -> tuple[str, str]:
        """Why the stage did not start, empty when it did; and where rank 0 listens."""
        while (start := self._folder.started()) is None:
            self._beat.tick()
            why = self._reason_to_kill()
            if not why and (self._folder.ordered_end() or self._leaving()):
                why = "left before the start"
            if why:
                return why, ""
            time.sleep(POLL_S)
        ids, endpoint = start
        return ("" if self._id in ids else "another host has this place"), endpoint

    def _run_ranks(self, endpoint: str, started: Callable[[Path], None]) -> tuple[int | None, str]:
        offer, log = self._offer, host_log(Path(self._offer.log), self._number)
        os.chdir(offer.directory)
        place = Path(tempfile.mkdtemp(prefix="dflow-agent-"))
        life_line_path = place / "alive"
        os.mkfifo(life_line_path)
        life_line = os.open(life_line_path, os.O_RDWR)
        children = Children(stage_environment(1))
        redacted = None
        try:
            secrets = secret_values(node_from_json(self._spec.node_json).config)
            log.touch()
            redacted = RedactedLog(place / "output", log, secrets) if secrets else None
            job = self._folder.path / f"job-{self._number}.json.host"
            attrs.evolve(self._spec, life_line=life_line_path).write(job)
            child = children.start(
                "executor.launchers.torchrun",
                torchrun_arguments(offer, self._folder, self._number, job, endpoint),
                {
                    **stage_environment(offer.threads, self._gpus()),
                    STAGE: stage_mark(self._spec.folder, self._spec.lease_id),
                },
                log if redacted is None else redacted.pipe,
            )
            started(log)
            why = self._watch(child)
            return child.wait(), why
        finally:
            children.close()
            os.close(life_line)
            _wait_for_readers(life_line_path)
            if redacted is not None:
                redacted.close()
            shutil.rmtree(place, ignore_errors=True)

    def _gpus(self) -> tuple[str, ...] | None:
        """The devices that the ranks see here. Raises StageError where this host has fewer than the stage needs."""
        if self._offer.gpus is None:
            return None
        here = devices()
        if len(here) < self._offer.gpus:
            raise StageError(f"the stage needs {self._offer.gpus} GPUs on each host; this host has {len(here)}")
        return here[: self._offer.gpus]

    def _watch(self, child: Child) -> str:
        """Wait until torchrun has ended, or end it. Returns why it was killed, empty where it was not."""
        while not child.ended_within(POLL_S):
            why = self._reason_to_kill()
            if why or self._folder.ordered_end() == "kill":
                child.signal(signal.SIGKILL, whole_group=True)
                child.wait()
                return why
            self._beat.tick()
            is_stop = (Path(self._offer.results) / STOP_REQUESTED).exists() or bool(self._folder.ordered_end())
            if is_stop and not self.is_stopping:  # once: a second SIGTERM would end torchrun before its ranks
                self.is_stopping = True
                child.signal(signal.SIGTERM)
        return ""

    def _reason_to_kill(self) -> str:
        lease = read_object(self._folder.work_folder / "lease") or {}
        if (lease.get("token"), lease.get("id")) != (self._spec.token, self._spec.lease_id):
            return "the lease passed to another attempt"
        if not self._folder.beat_path(0).exists():
            return "the stage is over"
        if self._executor.silence() > SILENT_S:
            return f"the executor on {self._offer.executor} has been silent for {SILENT_S:g} s"
        return "the agent was stopped" if self._leaving() > 1 else ""


def join_stage(folder: HostFolder, leaving: Callable[[], int]) -> tuple[Member, int] | None:
    """This host's place in a stage and its number, None where all places are taken. Raises StageError where the stage
    cannot run here.
    """
    offer = folder.offer()
    if offer is None:
        return None
    own_id = os.urandom(8).hex()
    for number in range(1, offer.hosts):
        if folder.member(number) is None:
            member = Member(folder, offer, number, own_id, leaving)
            try:
                if folder.join(number, own_id):
                    return member, number
            except FileNotFoundError as error:
                raise StageError("the stage is gone") from error
    return None


def _wait_for_readers(life_line: Path) -> None:
    """Return when the last rank has closed its life line, which has no writer any more."""
    deadline = time.monotonic() + RANKS_END_WITHIN_S
    while time.monotonic() < deadline:
        try:
            os.close(os.open(life_line, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # ENXIO: nobody reads
            return
        time.sleep(POLL_S)
