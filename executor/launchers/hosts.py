"""Stages on several hosts: what a host reports, its part of a stage to the end, and what the end of one part means."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from attrs import frozen

from dsl.errors import DflowError, DiskFull
from dsl.files import NO_SPACE
from dsl.imports import PROJECT
from dsl.secrets import values_of
from executor.launchers.backend import HostExit, StageOrder, exits_path
from executor.launchers.host_run import HostRun
from executor.launchers.stage_contract import StageSpec, read_exits, report_lost
from executor.store.lease import Holder
from executor.system.resource_pool import VISIBLE
from executor.system.supervisor import GONE, exit_text

# Variables of the executor's environment that its stages get on other hosts too, beside those of secrets.
FORWARDED = (
    *("DFLOW_", "HF_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "TRITON_", "NCCL_", "GLOO_", "SGLANG_"),
    *("CUDA_", "CUBLAS_", "OMP_", "GOMP_", "KMP_"),
)
HERE = "this machine"
LEASE_EVERY_S = 2.0


@frozen(kw_only=True)
class HostFacts:
    """A host's report. ray, python: versions. sources: digest of dflow's sources. problem: why all else is missing.

    address: "host:port" where rank 0 could listen. unseen: the paths that the host cannot see.
    """

    name: str
    ray: str = ""
    python: str = ""
    sources: str = ""
    address: str = ""
    unseen: tuple[str, ...] = ()
    problem: str = ""


def digest_of_sources() -> str:
    """SHA-256 of dflow's own Python files."""
    digest = hashlib.sha256()
    for room in ("dsl", "executor", "ops"):
        for file in sorted((PROJECT / room).rglob("*.py")):
            digest.update(f"{file.relative_to(PROJECT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def host_facts(name: str, paths: tuple[str, ...] = (), own: str = "") -> HostFacts:
    """The facts of this host. paths: what it has to see; own: the address by which other hosts reach it."""
    unseen = tuple(path for path in paths if not Path(path).exists())
    return HostFacts(
        name=name,
        ray=metadata.version("ray"),
        python=platform.python_version(),
        sources=digest_of_sources(),
        address=_free_address(own) if own else "",
        unseen=unseen,
    )


def _free_address(own: str) -> str:
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((own, 0))
        return f"{own}:{probe.getsockname()[1]}"


def host_faults(host: HostFacts, here: HostFacts) -> Iterator[tuple[str, str]]:
    """Pairs of a reason why a host cannot run stages of this one, and what to do about it."""
    if host.problem:
        yield f"cannot run dflow: {host.problem}", "install this dflow there, with dflow[ray]"
        return
    for path in host.unseen:
        yield f"does not see {path}", "the store and the data must have the same path on all hosts"
    if host.sources != here.sources:
        yield f"runs another dflow than {here.name}", "install the same version"
    if host.python != here.python:
        yield f"runs Python {host.python}, and {here.name} {here.python}", "install the same version"
    if host.ray != here.ray:
        yield f"runs Ray {host.ray}, and {here.name} {here.ray}", "install the same version"


def forwarded_variables(secrets: Sequence[str]) -> dict[str, str]:
    """The variables of this process that other hosts get; names of devices are a host's own."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in secrets or (name.startswith(FORWARDED) and name != VISIBLE)
    }


class RemoteHost:
    """An actor's side of a stage: runs one part of it in this process's environment. Thread-safe.

    own: the address by which other hosts reach this one.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._run: HostRun | None = None
        self._is_ending = False
        self._lock = threading.Lock()

    def run(
        self, order: StageOrder, number: int, gpus: tuple[str, ...] | None, address: str, forwarded: Mapping[str, str]
    ) -> HostExit:
        """Run a part of a stage to its end, and return its exit. It ends soon after the lease passes to another
        attempt.

        number, gpus, address: as in HostRun. forwarded: variables of the executor.
        """
        try:
            return self._exit(order, number, gpus, address, forwarded)
        except DiskFull:
            return HostExit(code=NO_SPACE)
        except (DflowError, OSError) as error:
            return HostExit(code=None, error=f"{type(error).__name__}: {error}")

    def _exit(
        self, order: StageOrder, number: int, gpus: tuple[str, ...] | None, address: str, forwarded: Mapping[str, str]
    ) -> HostExit:
        os.chdir(order.directory)
        os.environ.pop(VISIBLE, None)  # the part's own devices are set for it
        os.environ.update(forwarded)
        interface = _interface_of(self._own) if address else ""
        networks = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
        spec = StageSpec.read(order.job, order.job_digest)
        with self._lock:
            if self._is_ending or spec is None:
                return HostExit(code=-signal.SIGTERM)
            secrets = values_of(order.secrets)
            self._run = run = HostRun(order, gpus, secrets, number=number, address=address, variables=networks)
        while (ended := run.wait(LEASE_EVERY_S)) is None:
            if Holder.read(order.folder).id != spec.lease_id:
                run.kill()
        return ended

    def request_stop(self) -> None:
        with self._lock:
            if self._run is not None and not self._is_ending:
                self._run.request_stop()
            self._is_ending = True

    def kill(self) -> None:
        with self._lock:
            self._is_ending = True
            if self._run is not None:
                self._run.kill()


class ExitsByHost:
    """Notes how the parts of a stage end, each on a host. hosts: the names of these, by number."""

    def __init__(self, order: StageOrder, hosts: Sequence[str]) -> None:
        self._results = order.results
        self._is_shared = order.launch.shard_workers > 1
        self._hosts = tuple(hosts)
        self._exits: dict[int, HostExit] = {}
        self._lost: dict[int, str] = {}

    def ended(self, number: int, how: HostExit) -> None:
        self._exits[number] = how
        if how.code != 0 and self._is_shared:
            report_lost(self._results, number)

    def lost(self, number: int, reason: str) -> None:
        """Note that the host of a part is lost, or might be."""
        self._lost[number] = f"{self.host(number)}: {reason}"
        self.ended(number, HostExit(code=None))

    def host(self, number: int) -> str:
        return f"host {number} ({self._hosts[number]})"

    @property
    def ends_others(self) -> bool:
        """Whether the remaining parts of a stage must end, because of a part that ended.

        Workers that share shards continue when one is killed, but not after an error, which they would meet as well.
        """
        if any(each.error for each in self._exits.values()):
            return True
        if not self._is_shared:
            return any(each.code != 0 for each in self._exits.values())
        exits = [each for number in self._exits for each in read_exits(exits_path(self._results, number))]
        return any(each.code > 0 and each.code != GONE for each in exits)

    def exit(self) -> HostExit:
        """The exit of the whole stage, once all parts have ended."""
        codes = [each.code for each in self._exits.values()]
        is_done = 0 in codes if self._is_shared else not any(code != 0 for code in codes)
        failed = [
            f"the processes on {self.host(number)}: the first {exit_text(each.code)}"
            for number, each in self._exits.items()
            if each.code
        ]
        return HostExit(
            code=0 if is_done else next((code for code in codes if code), None),
            hosts=self._hosts,
            lost="; ".join(self._lost.values()),
            failed="; ".join(failed),
            error="; ".join(f"{self.host(number)}: {each.error}" for number, each in self._exits.items() if each.error),
            log_errno=next((each.log_errno for each in self._exits.values() if each.log_errno), 0),
        )


def _interface_of(own: str) -> str:
    """The network interface with this address, so that ranks use no other network; empty where none has it."""
    import psutil

    found = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if own in [each.address.partition("%")[0] for each in addresses]
    )
    return next(found, "")
