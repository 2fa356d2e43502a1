"""A part of a stage on another host than the executor's: whether it can run there, and its run, to its end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import attrs
from attrs import frozen

from dsl.errors import DflowError, DiskFull
from dsl.imports import PROJECT
from dsl.json_files import append_line
from dsl.os_errors import NO_SPACE
from dsl.secrets import values_of
from executor.launchers.backend import StageOrder
from executor.launchers.forkserver_client import Children
from executor.launchers.host_facts import digest_of_sources
from executor.launchers.host_runner import HostPart, HostRunner
from executor.launchers.parts import PartExit
from executor.launchers.stage_contract import StageSpec
from executor.launchers.stage_environment import stage_environment
from executor.records.events import Body, Event, System
from executor.store.lease import Holder
from executor.system.resource_pool import VISIBLE
from executor.system.system_metrics import Usage

# Variables of the executor's environment that its stages get on other hosts too, beside those of secrets.
FORWARDED = (
    *("DFLOW_", "HF_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "TRITON_", "NCCL_", "GLOO_", "SGLANG_"),
    *("CUDA_", "CUBLAS_", "OMP_", "GOMP_", "KMP_"),
)
LEASE_EVERY_S = 2.0


@frozen(kw_only=True)
class PartFacts:
    """What a host reports before it starts anything. address: "host:port" where rank 0 could listen; problem: why the
    stage cannot run there, empty where it can.
    """

    name: str
    address: str
    problem: str = ""


def part_facts(order: StageOrder, sources: str, own: str) -> PartFacts:
    """sources: `digest_of_sources` of the executor's host; own: the address by which other hosts reach this one."""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((own, 0))
        port = probe.getsockname()[1]
    problem = ""
    if not order.job.exists() or not order.directory.is_dir():
        gone = order.directory if order.job.exists() else order.folder
        problem = f"it does not see {gone}; the store and the data must have the same path on all hosts"
    elif digest_of_sources() != sources:
        problem = f"it runs another dflow ({PROJECT}) than this one; install the same version"
    return PartFacts(name=socket.gethostname(), address=f"{own}:{port}", problem=problem)


def forwarded_variables(secrets: Sequence[str]) -> dict[str, str]:
    """Those of this process that other hosts get; the names of devices are a host's own."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in secrets or (name.startswith(FORWARDED) and name != VISIBLE)
    }


class PartRunner:
    """Runs one part of a stage in this process's environment. Thread-safe."""

    def __init__(self) -> None:
        self._runner: HostRunner | None = None
        self._is_ending = False
        self._lock = threading.Lock()

    def run(self, order: StageOrder, part: HostPart, forwarded: Mapping[str, str], own: str) -> PartExit:
        """Run the part to its end, which comes soon after the lease has passed to another attempt.

        forwarded: variables of the executor; own: as in `part_facts`, for parts that meet others.
        """
        try:
            return self._run(order, part, forwarded, own)
        except DiskFull:
            return PartExit(code=NO_SPACE)
        except (DflowError, OSError) as error:
            return PartExit(code=None, error=f"{type(error).__name__}: {error}")

    def _run(self, order: StageOrder, part: HostPart, forwarded: Mapping[str, str], own: str) -> PartExit:
        os.chdir(order.directory)
        os.environ.pop(VISIBLE, None)  # the part's own devices are set for it
        os.environ.update(forwarded)
        interface = _interface_of(own) if part.address else ""
        networks = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
        spec = StageSpec.read(order.job, order.job_digest)
        children = Children(stage_environment(1))
        try:
            with self._lock:
                if self._is_ending or spec is None:
                    return PartExit(code=-signal.SIGTERM)
                part = attrs.evolve(part, variables={**networks, **part.variables})
                self._runner = runner = HostRunner(children, order, part, values_of(order.secrets))
            usage = _reported_usage(spec, part, runner)
            try:
                while not runner.ended_within(LEASE_EVERY_S):
                    if Holder.read(order.folder).id != spec.lease_id:
                        runner.kill()
            finally:
                usage.close()
                runner.close()
            return PartExit(code=runner.code, log_errno=runner.log_errno)
        finally:
            children.close()

    def request_stop(self) -> None:
        with self._lock:
            if self._runner is not None and not self._is_ending:
                self._runner.request_stop()
            self._is_ending = True

    def kill(self) -> None:
        with self._lock:
            self._is_ending = True
            if self._runner is not None:
                self._runner.kill()


def write_event(spec: StageSpec, body: Body) -> None:
    append_line(spec.events, Event(time.time(), spec.node, spec.attempt, body).to_json())


def _reported_usage(spec: StageSpec, part: HostPart, runner: HostRunner) -> Usage:
    """Samples what the processes of a part use. Metrics of other hosts than the first are named with its number."""
    prefix = f"host_{part.number}_" if part.number else ""

    def watched() -> list[tuple[str, int, Sequence[str] | None]]:
        return [] if runner.pid is None else [(spec.node, runner.pid, part.gpus)]

    def report(node: str, metrics: Mapping[str, float]) -> None:
        with suppress(DiskFull, OSError):  # which the stage reports itself
            write_event(spec, System({f"{prefix}{name}": value for name, value in metrics.items()}))

    usage = Usage(watched, report)
    usage.start()
    return usage


def _interface_of(own: str) -> str:
    """The network interface that has this address, so that ranks use no other network; empty where none has."""
    import psutil

    found = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if own in [each.address.partition("%")[0] for each in addresses]
    )
    return next(found, "")
