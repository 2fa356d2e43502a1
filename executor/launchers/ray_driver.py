"""The driver of one stage on a Ray cluster: places its parts, starts an actor for each, and watches them.

    python -m executor.launchers.ray_driver ORDER ADDRESS           (forked, see forkserver.py)

ORDER is the file of a StageOrder. An actor runs the HostRunner of its part; it is owned by this process, so Ray ends
it when this process is gone. It ends with its raylet too, and with the lease of the attempt. Ray never restarts it:
dflow's retries decide. How the stage ended is written to results-<attempt>/hosts.json, a HostsExit.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.convert import structure, unstructure
from dsl.errors import DflowError, DiskFull, StageError, shortened
from dsl.imports import PROJECT
from dsl.secrets import values_of
from executor.launchers.backend import HostsExit, StageOrder, exits_path
from executor.launchers.forkserver_client import Children
from executor.launchers.host_facts import digest_of_sources
from executor.launchers.host_runner import HostPart, HostRunner
from executor.launchers.ray_cluster import HOSTS, actor_names, actors_path, connected, end_actors, hosts_of
from executor.launchers.stage_contract import StageSpec, read_exits, report_lost
from executor.launchers.stage_environment import stage_environment
from executor.launchers.worker import ENDING
from executor.records.events import Body, Event, Info, System
from executor.store.lease import Holder
from executor.system.jsonlines import append_line, read_json, write_json
from executor.system.stage_mark import stage_mark
from executor.system.supervisor import end_with_parent, exit_text
from executor.system.system_metrics import Usage

# Variables of the executor's environment that its stages get on other hosts too, beside those of secrets.
FORWARDED = ("DFLOW_", "HF_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "SGLANG_")
WAITING_S = 5.0  # a stage that has found no room by then says so
END_WITHIN_S = 15.0
POLL_S = 0.2
LEASE_EVERY_S = 2.0


@frozen(kw_only=True)
class Facts:
    """What a host reports before it starts anything. address: "host:port" where rank 0 could listen; problem: why the
    stage cannot run there, empty where it can.
    """

    name: str
    address: str
    problem: str = ""


class Host:
    """The actor of one part of a stage."""

    def __init__(self) -> None:
        end_with_parent(os.getppid())  # the raylet
        self._runner: HostRunner | None = None
        self._is_stopping = False
        self._is_killed = False
        self._lock = threading.Lock()

    def facts(self, order: StageOrder, sources: str, head: str) -> Facts:
        """sources: `digest_of_sources` of the driver; head: the address of the cluster's head."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((head.rpartition(":")[0], 9))  # sends nothing; finds the address that other hosts see
            address = route.getsockname()[0]
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        problem = ""
        if not order.job.exists() or not order.directory.is_dir():
            gone = order.directory if order.job.exists() else order.folder
            problem = f"it does not see {gone}; the store and the data must have the same path on all hosts"
        elif digest_of_sources() != sources:
            problem = f"it runs another dflow ({PROJECT}) than this one; install the same version"
        return Facts(name=socket.gethostname(), address=f"{address}:{port}", problem=problem)

    def run(self, order: StageOrder, part: HostPart) -> int | None:
        """Run the part to its end. Returns the exit code, as `HostsExit` has it."""
        import ray

        os.chdir(order.directory)
        os.environ.update(part.variables)
        gpus = None if order.share.gpus is None else tuple(map(str, ray.get_gpu_ids()))
        interface = _interface_of(part.address.rpartition(":")[0]) if part.address else ""
        networks = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
        variables = {**networks, **part.variables}
        children = Children(stage_environment(1))
        try:
            with self._lock:
                if self._is_killed or self._is_stopping:
                    return -signal.SIGTERM
                part = attrs.evolve(part, gpus=gpus, variables=variables)
                self._runner = runner = HostRunner(children, order, part, values_of(order.secrets))
            usage = _reported_usage(order, part, runner)
            while not runner.ended_within(LEASE_EVERY_S):
                holder = Holder.read(order.folder)
                if stage_mark(order.folder, holder.id) != order.mark:
                    runner.kill()
            usage.close()
            runner.close()
            return runner.code
        finally:
            children.close()

    def request_stop(self) -> None:
        with self._lock:
            if self._runner is not None and not self._is_stopping:
                self._runner.request_stop()
            self._is_stopping = True

    def kill(self) -> None:
        with self._lock:
            self._is_killed = True
            if self._runner is not None:
                self._runner.kill()


class Driver:
    """Starts and watches the parts of a stage on a connected cluster."""

    def __init__(self, ray: Any, order: StageOrder, address: str) -> None:
        self._ray = ray
        self._order = order
        self._address = address
        self._launch = order.launch
        self._is_shared = order.launch.shard_workers > 1
        self._stop = threading.Event()
        for number in ENDING:
            signal.signal(number, lambda number, frame: self._stop.set())
        spec = StageSpec.read(order.job)
        if spec is None:
            raise StageError("the stage is gone")
        self._spec = spec
        self._names = actor_names(order)
        self._codes: dict[int, int | None] = {}
        self._lost: dict[int, str] = {}
        self._hosts: tuple[str, ...] = ()

    def run(self) -> HostsExit:
        """Raises StageError where the stage cannot run there."""
        group = self._placed()
        try:
            if group is None:
                return HostsExit(code=-signal.SIGTERM)
            actors = self._start(group)
            facts = self._facts(actors)
            self._hosts = tuple(each.name for each in facts)
            self._watch(actors, facts[0].address if self._launch.hosts > 1 else "")
        finally:
            if group is not None:
                self._ray.util.remove_placement_group(group)  # ends its actors
        left = end_actors(self._ray, self._names)
        if left:
            raise StageError(f"actors cannot be ended: {', '.join(left)}")
        actors_path(self._order).unlink(missing_ok=True)
        return self._exit()

    def _placed(self) -> Any:
        """A placement group with room for all parts, None where the stage was stopped while it waited."""
        group = self._ray.util.placement_group(
            [self._bundle() for _ in range(self._launch.parts)], strategy="SPREAD" if self._is_shared else "PACK"
        )
        waited, reported = time.monotonic(), False
        while not group.wait(POLL_S):
            if self._stop.is_set():
                self._ray.util.remove_placement_group(group)
                return None
            if not reported and time.monotonic() - waited > WAITING_S:
                reported = True
                self._inform(self._waiting())
        return group

    def _bundle(self) -> dict[str, float]:
        """What each part takes of its host."""
        share, launch = self._order.share, self._launch
        bundle: dict[str, float] = {"CPU": launch.cpus or share.threads * launch.processes_of_part}
        if share.gpus:
            bundle["GPU"] = len(share.gpus) // launch.parts
        if launch.memory_bytes:
            bundle["memory"] = launch.memory_bytes
        return bundle

    def _waiting(self) -> str:
        hosts = "; ".join(f"{host.name}: {_amounts(host.free)}" for host in hosts_of(self._ray))
        need = f"{self._launch.parts} x {_amounts(self._bundle())}"
        return f"waiting for room in the cluster {self._address}: needs {need}; free: {hosts}"

    def _start(self, group: Any) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        return [
            self._ray.remote(Host)
            .options(
                name=name,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                max_restarts=0,
                max_concurrency=3,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
            )
            .remote()
            for place, name in enumerate(self._names)
        ]

    def _facts(self, actors: list[Any]) -> list[Facts]:
        """What the hosts report. Raises StageError where one of them cannot run the stage."""
        facts: list[Facts] = self._ray.get(
            [actor.facts.remote(self._order, digest_of_sources(), self._address) for actor in actors]
        )
        problems = [f"host {number} ({each.name}): {each.problem}" for number, each in enumerate(facts) if each.problem]
        if problems:
            raise StageError("; ".join(problems))
        return facts

    def _watch(self, actors: list[Any], meeting: str) -> None:
        """Return when no part runs any more; when one fails, end the others."""
        secrets = self._order.secrets
        variables = {name: os.environ[name] for name in os.environ if name.startswith(FORWARDED) or name in secrets}
        running = {
            actor.run.remote(self._order, HostPart(number=number, address=meeting, variables=variables)): number
            for number, actor in enumerate(actors)
        }
        kill_at: float | None = None
        is_ending = False
        while running:
            ended, _ = self._ray.wait(list(running), num_returns=1, timeout=POLL_S)
            for each in ended:
                self._note_end(running.pop(each), each)
            failed = any(self._ends_others(number) for number in self._codes)
            if (failed or self._stop.is_set()) and not is_ending:
                is_ending, kill_at = True, None if self._stop.is_set() else time.monotonic() + END_WITHIN_S
                for number in running.values():
                    actors[number].request_stop.remote()
            if kill_at is not None and time.monotonic() > kill_at:
                kill_at = None
                for number in running.values():
                    actors[number].kill.remote()

    def _note_end(self, number: int, ended: Any) -> None:
        from ray.exceptions import RayActorError, RayError

        try:
            self._codes[number] = self._ray.get(ended)
        except RayActorError as error:
            left = end_actors(self._ray, [self._names[number]])
            still = "; it cannot be ended" if left else ""
            sentences = [line.strip() for line in str(error).splitlines() if line.strip().startswith("The ")]
            reason = shortened(" ".join(dict.fromkeys(sentences)) or type(error).__name__, 300)
            self._codes[number] = None
            self._lost[number] = f"host {number} ({self._hosts[number]}): {reason}{still}"
        except RayError as error:
            self._codes[number] = None
            self._lost[number] = f"host {number} ({self._hosts[number]}): {error}"
        if self._codes[number] != 0 and self._is_shared:
            report_lost(self._order.results, number)

    def _ends_others(self, number: int) -> bool:
        """Workers that share shards go on without one that was killed, and not after an error."""
        if not self._is_shared:
            return self._codes[number] != 0
        exits = read_exits(exits_path(self._order.results, number))
        return any(each.code > 0 for each in exits)

    def _exit(self) -> HostsExit:
        codes = list(self._codes.values())
        is_done = 0 in codes if self._is_shared else not any(code != 0 for code in codes)
        failed = "; ".join(
            f"the processes on host {number} ({self._hosts[number]}): the first {exit_text(code)}"
            for number, code in self._codes.items()
            if code
        )
        code = 0 if is_done else next((code for code in codes if code), None)
        return HostsExit(code=code, hosts=self._hosts, lost="; ".join(self._lost.values()), failed=failed)

    def _inform(self, text: str) -> None:
        """Show the user a line, and write it to the log."""
        print(f"info: {text}", flush=True)
        _write_event(self._spec, Info(text))


def _write_event(spec: StageSpec, body: Body) -> None:
    append_line(spec.events, Event(time.time(), spec.node, spec.attempt, body).to_json())


def _reported_usage(order: StageOrder, part: HostPart, runner: HostRunner) -> Usage:
    """Samples what the processes of a part use. Metrics of other hosts than the first are named with its number."""
    spec = StageSpec.read(order.job)
    prefix = f"host_{part.number}_" if part.number else ""

    def watched() -> list[tuple[str, int, Sequence[str] | None]]:
        return [] if runner.pid is None else [(order.node, runner.pid, part.gpus)]

    def report(node: str, metrics: Mapping[str, float]) -> None:
        with suppress(DiskFull, OSError):  # which the stage reports itself
            if spec is not None:
                _write_event(spec, System({f"{prefix}{name}": value for name, value in metrics.items()}))

    usage = Usage(watched, report)
    usage.start()
    return usage


def _amounts(sizes: Mapping[str, float]) -> str:
    shown = {name: f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:g}" for name, value in sizes.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _interface_of(address: str) -> str:
    """The network interface over which this host reaches another, so that ranks use no other network."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((address, 9))
        own = route.getsockname()[0]
    found = (name for name, addresses in psutil.net_if_addrs().items() if own in [each.address for each in addresses])
    return next(found, "")


def main() -> int:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # blocked by the forkserver
    file, address = Path(sys.argv[1]), sys.argv[2]
    order = structure(StageOrder, read_json(file))
    from ray.exceptions import RayError

    try:
        with connected(address) as ray:
            ended = Driver(ray, order, address).run()
    except (DflowError, OSError, RuntimeError, ValueError, RayError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        ended = HostsExit(code=None, lost=str(error))
    write_json(order.results / HOSTS, unstructure(ended))
    return 0


if __name__ == "__main__":
    sys.exit(main())
