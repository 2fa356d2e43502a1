"""A Ray cluster of several nodes on this machine, in a process of its own, as tests see one.

python ray_clusters.py CPUS GPUS NODES   prints a JSON line with address and process ids; reads commands:
add             another node joins; prints the JSON line again
kill            kills a worker node's raylet and reaps it; prints the line again
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from import_graph import PYTHON_PATH


class SimulatedCluster:
    """A Ray cluster of several nodes on this machine.

    address: of the head; raylets: process ids, the head's first; head: those of the head's own processes; environment:
    the variables with which it can be used.
    """

    def __init__(self, nodes: int, cpus: int = 1, gpus: int = 0, is_open: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, for its sockets
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text("0123456789abcdef" * 4)
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        own = {"RAY_AUTH_MODE": "disabled"} if is_open else {}
        (self._folder / "ray").mkdir()
        errors = (self._folder / "errors").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(cpus), str(gpus), str(nodes)],
            env={**os.environ, **self.environment, **own, "RAY_TMPDIR": str(self._folder), "PYTHONPATH": PYTHON_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        )
        errors.close()
        self._read()

    def _read(self) -> None:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError((self._folder / "errors").read_text()[-2000:])
        found: dict[str, Any] = json.loads(line)
        self.address: str = found["address"]
        self.raylets: list[int] = found["raylets"]
        self.head: list[int] = found["head"]

    def add(self) -> None:
        """Start another node."""
        self._do("add")

    def kill(self) -> None:
        """Kill the raylet of a node that is not the head, and wait for it."""
        self._do("kill")

    def _do(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._read()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def simulated_cluster(nodes: int, cpus: int = 1, gpus: int = 0, is_open: bool = False) -> Iterator[SimulatedCluster]:
    """Open a context with a cluster. cpus, gpus: of each node; is_open: clients need no token."""
    cluster = SimulatedCluster(nodes, cpus, gpus, is_open)
    try:
        yield cluster
    finally:
        cluster.close()


def _hold(cpus: str, gpus: str, nodes: str) -> None:
    from ray.cluster_utils import Cluster

    size = {"num_cpus": int(cpus), "num_gpus": int(gpus), "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    for _ in range(int(nodes) - 1):
        cluster.add_node(**size)
    _print(cluster)
    for line in sys.stdin:
        if line.strip() == "add":
            cluster.add_node(**size)
        else:
            raylet = next(iter(cluster.worker_nodes)).all_processes["raylet"][0].process
            raylet.kill()
            raylet.wait()
        _print(cluster)


def _print(cluster: Any) -> None:
    nodes = [cluster.head_node, *cluster.worker_nodes]
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    head = [each.process.pid for group in cluster.head_node.all_processes.values() for each in group]
    print(json.dumps({"address": cluster.address, "raylets": raylets, "head": head}), flush=True)


if __name__ == "__main__":
    _hold(*sys.argv[1:])
