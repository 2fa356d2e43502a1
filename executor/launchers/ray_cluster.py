"""Ray clusters: what one has, one of dflow's own on this machine, and whether old actors have ended.

    python -m executor.launchers.ray_cluster hosts ADDRESS              prints ClusterHosts, a JSON list
    python -m executor.launchers.ray_cluster check ADDRESS FILE FOLDER  prints HostFacts, a JSON list
    python -m executor.launchers.ray_cluster open ADDRESS               prints whether it lets anyone in, as JSON
    python -m executor.launchers.ray_cluster ended ADDRESS NAME...      prints the actors that cannot be ended
    python -m executor.launchers.ray_cluster hold FOLDER CPUS GPUS MEMORY   is a cluster; prints its address

Only these processes and the stages' drivers import Ray, which takes over signals and may end its process.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.convert import structure, unstructure
from dsl.errors import ClusterError, StageError, StructureError, shortened
from dsl.files import read_json_or_none
from dsl.imports import PROJECT, child_environment, module_command
from executor.launchers.backend import StageOrder
from executor.launchers.hosts import HostFacts, host_facts
from executor.store.lease import ACTORS
from executor.system.output import last_lines
from executor.system.resource_pool import Capacity
from executor.system.supervisor import ChildGroup, run_module

PROBE_WITHIN_S = 60.0
CONNECTS_WITHIN_S = 10.0
START_WITHIN_S = 120.0
HOST_REPORTS_WITHIN_S = 30.0
ACTOR_ENDS_WITHIN_S = 30.0
RAYLETS_END_WITHIN_S = 75.0  # without a head: RAY_gcs_rpc_server_reconnect_timeout_s is 60
NAMESPACE = "dflow"
NO_TOKEN = "its token is missing or wrong here: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH as on its hosts"
# In the folder for results of a stage: its HostExit; and the file that exists once it has room.
HOSTS, PLACED = "hosts.json", "placed"
POLL_S = 0.2


@frozen(kw_only=True)
class ClusterHost:
    """A living host of a cluster. memory: bytes that Ray manages. free: unused resources, by Ray's names."""

    id: str
    name: str
    cpus: int
    gpus: int
    memory: int
    free: Mapping[str, float]

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.cpus, self.memory, tuple(map(str, range(self.gpus))))

    @property
    def unused(self) -> Capacity:
        gpus = tuple(map(str, range(int(self.free["GPU"]))))
        return Capacity(int(self.free["CPU"]), int(self.free["memory"]), gpus)


@frozen(kw_only=True)
class Actors:
    """The actors of an attempt, by their names in Ray's namespace."""

    address: str
    names: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Actors | None:
        """Read the actors from a file; None for a file that is incomplete: the attempt had not started any."""
        try:
            return structure(cls, read_json_or_none(path))
        except (ValueError, StructureError):
            return None


def actor_names(order: StageOrder) -> list[str]:
    """A name for each part of a stage, unique to the attempt: a cluster has one living actor of a name."""
    return [f"{order.folder.name[:16]}-{order.job.stem}-{part}" for part in range(order.launch.parts)]


def actors_path(order: StageOrder) -> Path:
    """The file that names the Actors of a stage until all of them have ended."""
    return order.folder / f"{ACTORS}{order.job.stem}.json"


@cache
def find_hosts(address: str, *, accepts_open: bool) -> tuple[ClusterHost, ...]:
    """The hosts of a cluster, as they were at the first call in this process.

    accepts_open: whether it may let anyone in. Raises ClusterError where it cannot be reached, or must not be used.
    """
    if not accepts_open:
        require_authentication(address)
    return structure(tuple[ClusterHost, ...], json.loads(_asked(address, "hosts")))


def check_hosts(address: str, file: Path, folder: Path) -> tuple[HostFacts, ...]:
    """The report of each host, including whether it sees a file and a folder. Raises StageError as
    `find_hosts` does.
    """
    return structure(tuple[HostFacts, ...], json.loads(_asked(address, "check", str(file), str(folder))))


def is_open(address: str) -> bool:
    """Whether a cluster lets in clients without a token, found by asking without one. Raises ClusterError if it is
    silent.
    """
    return bool(json.loads(_asked(address, "open")))


def require_authentication(address: str) -> None:
    """Check that a cluster requires authentication, since its processes run what others send. Raises ClusterError."""
    if is_open(address):
        raise ClusterError(
            f"the Ray cluster {address} lets anyone in without a token, so it is not used: start Ray on all its hosts "
            "with RAY_AUTH_MODE=token (docs/cluster.md), or accept it by DFLOW_RAY_WITHOUT_AUTHENTICATION="
            f"{address} or `ray_without_authentication = true` in [machine]"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":  # Ray would go on asking for 20 s
        raise ClusterError(f"the Ray cluster {address} cannot be used from here: {NO_TOKEN}")


def unended(actors: Actors, go_on: Callable[[], None], *, accepts_open: bool) -> tuple[str, ...]:
    """The actors of an earlier attempt that cannot be ended. Raises StageError.

    Without its head, a cluster's raylets end themselves and their actors. go_on: called while waiting; as in
    `Backend.recover`.
    """
    deadline = time.monotonic() + RAYLETS_END_WITHIN_S
    while not listens(actors.address):
        if time.monotonic() > deadline:
            return ()
        go_on()
        time.sleep(POLL_S)
    if not accepts_open:
        require_authentication(actors.address)
    return structure(tuple[str, ...], json.loads(_asked(actors.address, "ended", *actors.names, go_on=go_on)))


def listens(address: str) -> bool:
    """Whether something answers at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTS_WITHIN_S):
            return True
    except OSError:
        return False


def _asked(address: str, command: str, *arguments: str, go_on: Callable[[], None] | None = None) -> str:
    """The last line that a command of this module prints, run in a process of its own."""
    if not listens(address):
        raise ClusterError(f"the Ray cluster {address} cannot be reached: nothing answers there")
    ended = run_module(
        "executor.launchers.ray_cluster", command, address, *arguments, within_s=PROBE_WITHIN_S, go_on=go_on
    )
    if ended.code != 0:
        raise ClusterError(
            f"the Ray cluster {address} cannot be used from here: {ended.reason}; dflow has to run on a host of the "
            "cluster, with its token: see docs/cluster.md"
        )
    return ended.output.splitlines()[-1]


@frozen
class GivenCluster:
    """A cluster that the user started."""

    address: str
    variables: Mapping[str, str] = {}

    def address_within(self, seconds: float) -> str:
        return self.address


class OwnCluster:
    """A cluster of this process on this machine, which only this user can use; it never outlives this process.

    variables: what a process needs to use it. Thread-safe.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._address = ""
        self._is_ended = False
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + START_WITHIN_S
        self._folder = Path(tempfile.mkdtemp(prefix="dflow-ray-"))  # short: it holds sockets, whose paths are limited
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        sizes = (str(capacity.cpus), str(len(capacity.gpus)), str(capacity.memory))
        self._log = self._folder / "log"
        with self._log.open("wb") as errors:
            self._group = ChildGroup(
                module_command("executor.launchers.ray_cluster", "hold", str(self._folder), *sizes),
                # Ray would kill the largest process of a machine that is nearly out of memory, whoever it belongs to.
                child_environment(**self.variables, RAY_memory_monitor_refresh_ms="0"),
                output=subprocess.PIPE,
                errors=errors,
            )

    def address_within(self, seconds: float) -> str | None:
        """The cluster's address; None where it has not started within `seconds`.

        Raises StageError where it failed to start, or was closed.
        """
        with self._lock:
            if self._address:
                return self._address
            if self._is_ended:
                raise StageError("Ray did not start on this machine")
            output = self._group.process.stdout
            assert output is not None
            if select.select([output], [], [], seconds)[0]:
                self._address = next(self._group.lines(), "").strip()
            elif time.monotonic() < self._deadline:
                return None
            if not self._address:
                self._is_ended = True
                reason = " ".join(last_lines(self._log, 0)[-1:])
                raise StageError(f"Ray did not start on this machine: {reason or f'it took {START_WITHIN_S:g} s'}")
            return self._address

    @property
    def is_gone(self) -> bool:
        """Whether the cluster has ended, or did not start."""
        return self._is_ended or self._group.ended_within(0) or (bool(self._address) and not listens(self._address))

    def close(self) -> None:
        with self._lock:
            self._is_ended = True
            self._group.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Open a context with Ray connected to a cluster as one of its hosts, without its output. Raises
    ConnectionError.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.chdir(PROJECT)  # Ray puts the driver's directory into the path of the actors, where `ops` may be the user's
    if not listens(address):  # Ray would go on asking
        raise ConnectionError(f"nothing answers at {address}")
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # the last lines of a lost host's log
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError) as error:
        if "AuthToken" in str(error.__cause__ or error):
            raise ConnectionError(NO_TOKEN) from error
        cause = str(error.__cause__ or error).strip()  # another version, on several lines; or a traceback
        reason = cause.splitlines()[-1] if "Traceback" in cause else " ".join(cause.split())
        raise ConnectionError(shortened(reason, 300)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def hosts_of(ray: Any) -> list[ClusterHost]:
    """The living hosts of the connected cluster."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        ClusterHost(
            id=node["NodeID"],
            name=node["NodeManagerHostname"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            memory=int(node["Resources"].get("memory", 0)),
            free={name: free.get(node["NodeID"], {}).get(name, 0.0) for name in ("CPU", "GPU", "memory")},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _check(ray: Any, *paths: str) -> list[HostFacts]:
    """The facts of all hosts, each found by a task on the host that waits for no CPU."""
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    run = ray.remote(host_facts).options
    tasks = {}
    for host in hosts_of(ray):
        there = NodeAffinitySchedulingStrategy(host.id, soft=False)
        tasks[run(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(host.name, paths)] = host.name
    ray.wait(list(tasks), num_returns=len(tasks), timeout=HOST_REPORTS_WITHIN_S)
    facts: list[HostFacts] = []
    for each, name in tasks.items():
        try:
            facts.append(ray.get(each, timeout=0.1))
        except RayError as error:
            facts.append(HostFacts(name=name, problem=str(error).strip().splitlines()[-1]))
    return facts


def end_actors(ray: Any, names: list[str]) -> list[str]:
    """Kill actors by name; returns those that are still alive after a while."""
    deadline = time.monotonic() + ACTOR_ENDS_WITHIN_S
    running = names
    while running and time.monotonic() < deadline:
        running = [name for name in running if _is_killed(ray, name)]
        time.sleep(POLL_S if running else 0)
    return running


def _is_killed(ray: Any, name: str) -> bool:
    """Kill an actor; False where there is none of that name."""
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return False
    return True


def _lets_anyone_in(address: str) -> bool:
    """Whether the head accepts a process without a token. Ray reads the token's variable when it is imported."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub lacks it
    from ray.exceptions import AuthenticationError

    try:
        GcsClient(address=address).get_all_node_info(timeout=CONNECTS_WITHIN_S)
    except AuthenticationError:
        return False
    return True


def _hold(folder: str, cpus: str, gpus: str, memory: str) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        context = ray.init(
            address="local",  # also where RAY_ADDRESS names a cluster
            num_cpus=int(cpus),
            num_gpus=int(gpus),
            _memory=int(memory),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
        )
        print(context.address_info["address"], flush=True)
        signal.pause()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main(command: str, *arguments: str) -> None:
    if command == "hold":
        _hold(*arguments)
        return
    address, *others = arguments
    if command == "open":
        print(json.dumps(_lets_anyone_in(address)), flush=True)
        return
    with connected(address) as ray:
        match command:
            case "ended":
                found: Any = end_actors(ray, others)
            case "check":
                found = _check(ray, *others)
            case _:
                found = hosts_of(ray)
        print(json.dumps(unstructure(found)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
