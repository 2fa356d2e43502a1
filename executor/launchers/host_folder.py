"""Rendezvous of the hosts of one stage: files in the shared store, in the stage's work folder.

    work/<key>/hosts-<attempt>/
        offer.json         what a host needs to join, see Offer
        <n>.json           host n joined: {"host", "pid", "id"}; the executor's host is 0, and has none
        start.json         all have joined: {"ids": [of hosts 1, 2, ...], "endpoint": where rank 0 listens, "host:port"}
        end                the executor's order: "term" (it failed elsewhere) or "kill"
        beat, <n>.beat     numbers that the executor and host n change every BEAT_S
        <n>.ended.json     host n runs nothing any more: {"code": of its torchrun, "why"}

A side whose number does not change for SILENT_S counts as dead. Numbers are compared, never the clocks of two hosts.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from executor.system.jsonlines import read_object, write_json
from executor.system.symlinks import new_file, open_own

BEAT_S = 1.0
SILENT_S = 30.0
POLL_S = 0.2


@frozen(kw_only=True)
class Offer:
    """A stage that needs hosts. hosts: including the executor's; nproc: ranks of each host; gpus: number that
    each host provides, None for all of its own. Paths are valid on all hosts.
    """

    node: str
    run: str
    executor: str
    hosts: int
    nproc: int
    threads: int
    gpus: int | None
    job: str
    results: str
    log: str
    directory: str


class HostFolder:
    """The rendezvous files of the hosts of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def work_folder(self) -> Path:
        return self.path.parent

    def offer(self) -> Offer | None:
        data = read_object(self.path / "offer.json")
        return None if data is None else Offer(**data)

    def write_offer(self, offer: Offer) -> None:
        write_json(self.path / "offer.json", attrs.asdict(offer))

    def join(self, number: int, own_id: str) -> bool:
        """Claim place `number`. Returns whether it was free."""
        try:
            descriptor = os.open(self.path / f"{number}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"host": socket.gethostname(), "pid": os.getpid(), "id": own_id}, file)
        except OSError:  # the disk is full: free the place again
            (self.path / f"{number}.json").unlink(missing_ok=True)
            raise
        return True

    def member(self, number: int) -> dict[str, Any] | None:
        """Who is host `number`; None where nobody is, or the file is not complete yet."""
        return read_object(self.path / f"{number}.json")

    def dismiss(self, number: int) -> None:
        """Free the place of a host that is gone."""
        for name in (f"{number}.beat", f"{number}.ended.json", f"{number}.json"):
            (self.path / name).unlink(missing_ok=True)

    def start(self, ids: list[str], endpoint: str) -> None:
        write_json(self.path / "start.json", {"ids": ids, "endpoint": endpoint})

    def started(self) -> tuple[list[str], str] | None:
        """The ids of the participating hosts and the endpoint; None before all have joined."""
        data = read_object(self.path / "start.json")
        return None if data is None else (data["ids"], data["endpoint"])

    def order_end(self, how: str) -> None:
        """how: "term" or "kill"."""
        fresh = self.path / f".end.{threading.get_ident()}"  # two threads of the executor may order it at once
        with new_file(fresh) as file:
            file.write(how.encode())
        fresh.replace(self.path / "end")

    def ordered_end(self) -> str:
        """The order, empty where there is none."""
        try:
            return (self.path / "end").read_text()
        except FileNotFoundError:
            return ""

    def report_end(self, number: int, code: int | None, why: str = "") -> None:
        write_json(self.path / f"{number}.ended.json", {"code": code, "why": why})

    def reported_end(self, number: int) -> dict[str, Any] | None:
        return read_object(self.path / f"{number}.ended.json")

    def beat_path(self, number: int) -> Path:
        return self.path / (f"{number}.beat" if number else "beat")


class Beat:
    """A heartbeat: changes the number in a file every BEAT_S; `tick` is called more often. Raises FileNotFoundError
    where the folder is gone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._next = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next, self._number = now + BEAT_S, self._number + 1
        # In place and of fixed width, so that it works on a full disk. Closed each time, so that other hosts see it.
        descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, b"%020d" % self._number, 0)
        finally:
            os.close(descriptor)


class Pulse:
    """How long a heartbeat has been silent, by this process's own monotonic clock.

    A long time between two reads counts as BEAT_S: a file system that hung, or this process asleep, says nothing about
    the other side.
    """

    def __init__(self, path: Path) -> None:
        self.has_changed = False
        self._path = path
        self._seen = self._read()
        self._silence = 0.0
        self._read_at = time.monotonic()

    def silence(self) -> float:
        """Seconds since the number was last seen to change, or since this object was created."""
        number, now = self._read(), time.monotonic()
        self._silence += min(now - self._read_at, BEAT_S)
        self._read_at = now
        if number != self._seen:
            self._seen, self._silence, self.has_changed = number, 0.0, True
        return self._silence

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def torchrun_arguments(offer: Offer, folder: HostFolder, number: int, job: Path, endpoint: str) -> list[str]:
    """For `executor.launchers.torchrun` on host `number`, whose first rank is number * nproc."""
    where = ["--nnodes", str(offer.hosts), "--node-rank", str(number), "--nproc-per-node", str(offer.nproc)]
    meeting = ["--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--rdzv-id", folder.path.name]
    return [exits_path(Path(offer.results), number), *where, *meeting, "-m", "executor.launchers.worker", str(job)]


def exits_path(results: Path, number: int) -> str:
    """Where torchrun on a host writes how ranks ended."""
    return str(results / f"exits-{number}.json")


def host_log(log: Path, number: int) -> Path:
    """The log of host `number`, beside the log of the stage, which is that of host 0."""
    return log.with_name(f"{log.stem}.host-{number}{log.suffix}") if number else log
