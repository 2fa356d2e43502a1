"""Ray clusters: who gets in, which one dflow joins, and what a host takes from a store that others write."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from host_ops import hosts_toy
from imitated_runs import begin, dflow, toy_pipeline
from ray_clusters import SimulatedCluster, simulated_cluster
from sockets import listeners, tree
from toy_ops import ONE_NODE, Toy, wait_for

from dsl.errors import ClusterError
from dsl.launch import Machine
from executor.cli import main
from executor.doctor.cluster import cluster_findings
from executor.launchers.backend import StageOrder
from executor.launchers.backends import LocalBackend
from executor.launchers.host_run import HostRun
from executor.launchers.ray_backend import RayBackend
from executor.launchers.ray_cluster import OwnCluster, find_hosts, is_open
from executor.planning.session import Session
from executor.system.resource_pool import Capacity

pytest.importorskip("ray", reason="Ray is not installed")
JOBS = ("/api/job_agent/jobs/", "/api/jobs/", "/get_or_create_runtime_env")  # what Ray's servers run by HTTP
HTTP = b"HTTP/1."


@pytest.fixture(scope="module")
def own() -> Iterator[OwnCluster]:
    cluster = OwnCluster(Capacity(1, 2 * 10**9, ()))
    wait_for(lambda: cluster.address_within(1) is not None, 240)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def open_cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(1, is_open=True) as cluster:
        yield cluster


def speaks_http(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(2)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            return connection.recv(16).startswith(HTTP)
        except OSError:
            return False


def test_dflows_own_cluster_lets_nobody_in_without_its_token(own, tmp_path, monkeypatch):
    address = own.address_within(0)
    assert address is not None and not is_open(address)
    for name in own.variables:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ClusterError, match="its token is missing or wrong here"):
        find_hosts(address, accepts_open=False)
    (tmp_path / "token").write_text("0" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")
    with pytest.raises(ClusterError, match="its token is missing or wrong here"):
        find_hosts(address, accepts_open=False)


def test_no_server_of_dflows_own_cluster_runs_what_comes_by_http_without_its_token(own):
    asked = 0
    for _ in range(10):  # a server that stands still takes part in the next round
        for each in listeners(tree(own._group.process.pid)):
            host = "127.0.0.1" if each.address.is_unspecified else str(each.address)
            for path in JOBS if speaks_http(host, each.port) else ():
                body = json.dumps({"entrypoint": "true"}).encode()
                request = urllib.request.Request(f"http://{host}:{each.port}{path}", body)
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(request, timeout=120)
                refused.value.close()
                assert refused.value.code in (401, 403)
                asked += 1
        if asked:
            break
    assert asked


def test_a_cluster_that_lets_anyone_in_is_refused_until_it_is_accepted_by_name(
    open_cluster, tmp_path, monkeypatch, capsys
):
    toy, address = hosts_toy(tmp_path, "wait"), open_cluster.address
    for name, value in open_cluster.environment.items():
        monkeypatch.setenv(name, value)
    plan = ["plan", str(toy.file), "--store", str(toy.store), "-s", "r.launch.hosts=1"]
    accepts = ("-s", "machine.ray_without_authentication=true")
    refused = f"the Ray cluster {address} lets anyone in without a token, so it is not used"

    monkeypatch.setenv("DFLOW_RAY_WITHOUT_AUTHENTICATION", "10.0.0.1:6379")
    assert main([*plan, "-s", f"machine.ray={address}"]) == 2
    assert refused in capsys.readouterr().out
    assert main([*plan, "-s", f"machine.ray={address}", *accepts]) == 0
    assert f"cluster {address}: 1 host" in capsys.readouterr().out

    monkeypatch.setenv("DFLOW_RAY_ADDRESS", address)
    assert main([*plan, *accepts]) == 2  # that was said of the table's own cluster
    assert refused in capsys.readouterr().out
    monkeypatch.setenv("DFLOW_RAY_WITHOUT_AUTHENTICATION", address)
    assert main(plan) == 0
    [found, *_] = cluster_findings(address, toy.store, tmp_path, accepts_open=False)
    assert (found.code, found.level) == ("authentication", "error")


class Listening:
    """A TCP server on this machine that counts its connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.came = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                with self._socket.accept()[0]:
                    self.came += 1

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def stranger() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.close()


def in_a_record(toy: Toy, address: str) -> Session:
    """Start a run, and rewrite its record so that the nodes run on the Ray cluster at `address`."""
    session = begin(toy)
    file = session.record.folder / "graph.json"
    graph = json.loads(file.read_text())
    graph["machine"] |= {"ray": address, "ray_without_authentication": True}
    for node in graph["nodes"]:
        node["launch"]["kind"] = "ray"
    file.write_text(json.dumps(graph))
    return session


def test_a_cluster_that_only_a_record_names_is_not_joined(stranger, tmp_path, capsys):
    toy = toy_pipeline(tmp_path)
    session = in_a_record(toy, stranger.address)
    assert dflow(toy, "status") == 0
    assert f"only the run's record names the Ray cluster {stranger.address}" in capsys.readouterr().out
    session.record.unlock()
    for arguments in (["resume"], ["resume", "--from", "a"], ["resume", "-s", "a.text=b"]):
        assert dflow(toy, *arguments) == 1
        assert f"give --ray {stranger.address}" in capsys.readouterr().err
    assert stranger.came == 0


def test_a_cluster_that_only_a_file_of_the_work_folder_names_is_not_joined(stranger, tmp_path):
    (tmp_path / "actors-1.json").write_text(json.dumps({"address": stranger.address, "names": ["one"]}))
    backend = RayBackend(Machine())
    with pytest.raises(ClusterError, match="which was not used from here"):
        backend.recover(tmp_path, lambda: None)
    assert stranger.came == 0


@pytest.mark.parametrize("name", ["job", "code"])
def test_what_others_write_into_the_files_of_a_stage_is_not_run(name, tmp_path, monkeypatch, capsys):
    """They write just before a host reads: the code of the stage, or its order to run other code."""
    toy, canary = Toy(tmp_path, ONE_NODE), tmp_path / "canary"
    start = LocalBackend.start

    def altered(backend: LocalBackend, order: StageOrder) -> HostRun:
        spec = json.loads(order.job.read_text())
        code = Path(spec["sources"])
        source = f"from pathlib import Path; Path({str(canary)!r}).touch()\n"
        text = json.dumps({file: source + own for file, own in json.loads(code.read_text()).items()})
        if name == "job":
            theirs = tmp_path / "theirs.json"
            theirs.write_text(text)
            spec |= {"sources": str(theirs), "sources_digest": hashlib.sha256(text.encode()).hexdigest()}
            order.job.write_text(json.dumps(spec))
        else:
            code.write_text(text)
        return start(backend, order)

    monkeypatch.setattr(LocalBackend, "start", altered)
    assert main(["run", str(toy.file), "--store", str(toy.store), "-s", "mlflow.tracking=false"]) == 1
    assert "somebody else has changed it since dflow wrote it" in capsys.readouterr().err
    assert not canary.exists()
