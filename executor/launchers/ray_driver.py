"""The driver of one stage on a Ray cluster: places its parts, starts an actor for each, and watches them.

    python -m executor.launchers.ray_driver ORDER ADDRESS

ORDER is a StageOrder as JSON, not a file, which whoever can write to the store could replace. An actor runs the
RemoteHost of its part; it is owned by this process, so Ray ends it when this process is gone. It ends with its raylet
too, and with the lease of the attempt. Ray never restarts it: dflow's retries decide. How the stage ended is written to
results-<attempt>/hosts.json, a HostExit.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from dsl.convert import structure
from dsl.errors import DflowError, StageError, shortened
from dsl.files import parse_json
from dsl.secrets import redact, values_of
from executor.launchers.backend import HostExit, StageOrder
from executor.launchers.host_run import write_event
from executor.launchers.hosts import (
    HERE,
    ExitsByHost,
    HostFacts,
    RemoteHost,
    forwarded_variables,
    host_facts,
    host_faults,
)
from executor.launchers.ray_cluster import (
    HOSTS,
    PLACED,
    START_WITHIN_S,
    actor_names,
    actors_path,
    connected,
    end_actors,
    hosts_of,
)
from executor.records.events import Info
from executor.system.supervisor import ENDING, begin_as_child, end_with_parent

WAITING_S = 5.0  # a stage that has found no room by then says so
END_WITHIN_S = 15.0
POLL_S = 0.2
LONGEST_REASON = 300
RAY_ID = re.compile(r"\b[0-9a-f]{24,} ")


class Host:
    """The Ray actor that runs one part of a stage."""

    def __init__(self) -> None:
        import ray

        end_with_parent(os.getppid())  # the raylet
        self._own = ray.util.get_node_ip_address()
        self._host = RemoteHost(self._own)

    def facts(self, order: StageOrder) -> HostFacts:
        return host_facts(socket.gethostname(), (str(order.job), str(order.directory)), self._own)

    def run(
        self, order: StageOrder, number: int, gpus: tuple[str, ...] | None, address: str, forwarded: Mapping[str, str]
    ) -> HostExit:
        import ray

        if gpus is None and order.part.gpus is not None:
            gpus = tuple(map(str, ray.get_gpu_ids()))
        return self._host.run(order, number, gpus, address, forwarded)

    def request_stop(self) -> None:
        self._host.request_stop()

    def kill(self) -> None:
        self._host.kill()


class Driver:
    """The driver of a stage on a connected cluster: it starts and watches the stage's parts."""

    def __init__(self, ray: Any, order: StageOrder, address: str) -> None:
        self._ray = ray
        self._order = order
        self._address = address
        self._stop = threading.Event()
        for number in ENDING:
            signal.signal(number, lambda number, frame: self._stop.set())
        self._names = actor_names(order)

    def run(self) -> HostExit:
        """Run the stage, and return its exit. Raises StageError where it cannot run on the cluster."""
        group = self._placed()
        try:
            return HostExit(code=-signal.SIGTERM) if group is None else self._ended(group)
        finally:
            if group is not None:
                self._ray.util.remove_placement_group(group)  # ends its actors
            if left := end_actors(self._ray, self._names):
                raise StageError(f"actors cannot be ended: {', '.join(left)}")
            actors_path(self._order).unlink(missing_ok=True)

    def _ended(self, group: Any) -> HostExit:
        """Run the stage in a placement group with room for it, and return its exit."""
        (self._order.results / PLACED).touch()
        actors = self._started(group)
        found = self._facts(actors)
        if isinstance(found, HostExit):
            return found
        exits = ExitsByHost(self._order, [each.name for each in found])
        self._watch(exits, actors, found[0].address if self._order.launch.hosts > 1 else "")
        return exits.exit()

    def _placed(self) -> Any:
        """Wait for a placement group with room for all parts; None where the stage was stopped first."""
        launch = self._order.launch
        strategy = "SPREAD" if launch.shard_workers > 1 else "PACK"
        group = self._ray.util.placement_group([self._bundle()] * launch.parts, strategy=strategy)
        waited, reported = time.monotonic(), False
        while not group.wait(0):  # in whole seconds
            if self._stop.wait(POLL_S):
                self._ray.util.remove_placement_group(group)
                return None
            if not reported and time.monotonic() - waited > WAITING_S:
                reported, text = True, self._waiting()
                if not group.wait(0):  # else what is free was asked after it was placed
                    self._inform(text)
        return group

    def _bundle(self) -> dict[str, float]:
        """The resources that each part takes of its host, by Ray's names."""
        part = self._order.part
        sizes = {"CPU": part.cpus, "GPU": part.gpus or 0, "memory": part.memory}
        return {name: float(size) for name, size in sizes.items() if size}

    def _waiting(self) -> str:
        free = "; ".join(f"{host.name}: {host.unused}" for host in hosts_of(self._ray))
        needs = f"{self._order.launch.parts} x ({self._order.part})"
        return f"waiting for room in the cluster {self._address}: needs {needs}; free: {free}"

    def _started(self, group: Any) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        return [
            self._ray.remote(Host)
            .options(
                name=name,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                max_restarts=0,
                max_concurrency=3,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
            )
            .remote()
            for place, name in enumerate(self._names)
        ]

    def _facts(self, actors: list[Any]) -> list[HostFacts] | HostExit:
        """The hosts' reports, or the stage's exit if it ended before. Raises StageError where it cannot run on them."""
        from ray.exceptions import RayActorError, RayError

        here, deadline = host_facts(HERE), time.monotonic() + START_WITHIN_S
        asked = [actor.facts.remote(self._order) for actor in actors]
        while len(self._ray.wait(asked, num_returns=len(asked), timeout=POLL_S)[0]) < len(asked):
            if self._stop.is_set():
                return HostExit(code=-signal.SIGTERM)
            if time.monotonic() > deadline:
                raise StageError(f"not all hosts have started the stage within {START_WITHIN_S:g} s")
        facts: list[HostFacts] = []
        problems: list[str] = []
        lost: list[str] = []
        for number, each in enumerate(asked):
            try:
                found: HostFacts = self._ray.get(each)
            except RayError as error:
                is_lost = isinstance(error, RayActorError) and not error.actor_init_failed
                (lost if is_lost else problems).append(f"host {number}: {self._reason(error)}")
            else:
                facts.append(found)
                faults = host_faults(found, here)
                problems += [f"host {number} ({found.name}): {what}; {remedy}" for what, remedy in faults]
        if problems:
            raise StageError("; ".join(problems))
        return HostExit(code=None, lost="; ".join(lost)) if lost else facts

    def _watch(self, exits: ExitsByHost, actors: list[Any], meeting: str) -> None:
        """Return when no part runs any more; when one fails, end the others."""
        order, share = self._order, self._order.share
        each = order.part.gpus or 0
        running = {}
        for number, actor in enumerate(actors):
            gpus = None if share.gpus is None else share.gpus[number * each : (number + 1) * each]
            forwarded = forwarded_variables(order.secrets)
            running[actor.run.remote(order, number, gpus, meeting, forwarded)] = number
        kill_at: float | None = None
        is_ending = False
        while running:
            for ended in self._ray.wait(list(running), timeout=POLL_S)[0]:
                self._note_end(exits, running.pop(ended), ended)
            if (exits.ends_others or self._stop.is_set()) and not is_ending:
                is_ending, kill_at = True, None if self._stop.is_set() else time.monotonic() + END_WITHIN_S
                for number in running.values():
                    actors[number].request_stop.remote()
            if kill_at is not None and time.monotonic() > kill_at:
                kill_at = None
                for number in running.values():
                    actors[number].kill.remote()

    def _note_end(self, exits: ExitsByHost, number: int, ended: Any) -> None:
        """Note how an actor ended. Raises StageError if Ray cannot reach or end it: it may still write."""
        from ray.exceptions import RayError, RayTaskError

        try:
            exits.ended(number, self._ray.get(ended))
        except RayTaskError as error:  # its processes have ended
            exits.ended(number, HostExit(code=None, error=self._reason(error)))
        except RayError as error:
            reason = self._reason(error)
            if end_actors(self._ray, [self._names[number]]):
                raise StageError(f"{exits.host(number)}: {reason}; it cannot be ended") from error
            exits.lost(number, reason)

    def _reason(self, error: Exception) -> str:
        """Ray's reason in a line: its sentences, without the names and ids between them, else its last line."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sentences = [line for line in lines if line.startswith("The ")] or lines[-1:]
        reason = RAY_ID.sub("", " ".join(dict.fromkeys(sentences))) or type(error).__name__
        return shortened(redact(reason, values_of(self._order.secrets)), LONGEST_REASON)

    def _inform(self, text: str) -> None:
        """Show the user a line, and write it to the log."""
        print(f"info: {text}", flush=True)
        write_event(self._order, Info(text))


def main() -> int:
    begin_as_child()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    text, address = sys.argv[1:]
    order = structure(StageOrder, parse_json(text))
    from ray.exceptions import RayError

    try:
        with connected(address) as ray:
            ended = Driver(ray, order, address).run()
    except (DflowError, OSError, RuntimeError, ValueError, RayError) as error:
        print(f"{type(error).__name__}: {redact(str(error), values_of(order.secrets))}", file=sys.stderr, flush=True)
        text = " ".join(redact(str(error), values_of(order.secrets)).split())
        ended = HostExit(code=None, error=shortened(text, 2 * LONGEST_REASON))
    ended.write(order.results / HOSTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
