"""Stages on a Ray cluster: nodes simulated on this machine stand for its hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from host_ops import hosts_toy, ranks
from ray_clusters import SimulatedCluster, simulated_cluster
from toy_ops import PROJECT, UNTRACKED, Toy, is_alive, wait_for

from executor.doctor.cluster import cluster_findings

pytest.importorskip("ray", reason="Ray is not installed")
HERE = socket.gethostname()


class OnRay:
    """A toy pipeline, and the command on it with the cluster's address and token."""

    def __init__(self, toy: Toy, cluster: SimulatedCluster) -> None:
        self.toy = toy
        self.environment = {**cluster.environment, "DFLOW_RAY_ADDRESS": cluster.address}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.toy.dflow(*(arguments or ("run", str(self.toy.file))), **self.environment, **variables)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.toy.start(*(arguments or ("run", str(self.toy.file))), program=UNTRACKED, **self.environment)

    def pids(self, count: int = 2) -> list[int]:
        """Process ids of the ranks, once all wait."""
        found: list[int] = []
        wait_for(lambda: bool(found) or bool(found.extend(ranks(self.toy, count)) or found), 120)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(3) as simulated:
        yield simulated


def actor_of(rank: int) -> psutil.Process:
    """The actor that runs a rank."""
    return next(each for each in psutil.Process(rank).parents() if each.name().startswith("ray::"))


def all_gone(pids: list[int]) -> None:
    """Wait until none of the processes runs any more."""
    wait_for(lambda: not any(map(is_alive, pids)))


def finished(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = run.communicate(timeout=300)
    return run.returncode, out, errors


def test_ranks_on_several_hosts_meet_and_no_secret_is_in_the_log_of_any(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "add"), cluster)
    ray.toy.file.write_text(f'{ray.toy.file.read_text()}token = "${{secret:HOSTS_TOKEN}}"\n')
    result = ray.run(HOSTS_TOKEN="open sesame")
    assert (result.returncode, ray.toy.text("r")) == (0, "3 of 2 ranks"), result.stdout + result.stderr
    record = next(ray.toy.store.glob("records/*"))
    assert "rank 0 got ***\n" in (record / "r.log").read_text()
    assert "rank 1 got ***\n" in (record / "r.host-1.log").read_text()
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"open sesame" in path.read_bytes()]
    assert kept == []


def test_a_rank_that_fails_on_another_host_ends_the_stage_and_its_traceback_comes_first(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "add"), cluster)
    result = ray.run("run", str(ray.toy.file), "-s", "r.how=fail")
    assert result.returncode == 1
    shown = (
        f"r failed: ValueError (rank 1 on {HERE}): a bug at 2 (rank 0 ended after it)\n    Traceback (most recent call"
    )
    assert result.stderr.startswith(shown), result.stderr
    assert "in broken\n" in result.stderr
    log = next(ray.toy.store.glob("records/*/r.host-1.log"))
    assert f"    log of that host: {log}\n" in result.stderr


def test_after_every_kill_nothing_runs_on_and_a_resume_goes_on(cluster, tmp_path):
    """A stop saves the ranks' work; then a rank, an actor, the stage's driver and the executor are killed in turn."""
    ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
    run = ray.start("run", str(ray.toy.file), "-s", "r.how=wait")
    ray.pids()
    run.send_signal(signal.SIGTERM)
    assert finished(run)[0] == 143
    assert ["saved-0", "saved-1"] == sorted(path.name for path in ray.toy.store.glob("work/*/state/*"))

    run = ray.start("resume")
    pids = ray.pids()
    events = next(ray.toy.store.glob("records/*/events.jsonl"))
    wait_for(lambda: "host_1_cpu_utilization_percentage" in events.read_text())
    os.kill(pids[1], signal.SIGKILL)
    code, _, errors = finished(run)
    assert code == 1
    assert f"r failed: rank 1 on {HERE} was killed (signal 9)" in errors
    all_gone(pids)

    run = ray.start("resume")
    pids = ray.pids()
    actor_of(pids[1]).kill()
    code, _, errors = finished(run)
    assert code == 1
    assert f"r failed: HostLost: host 1 ({HERE}): " in errors
    assert "what to do: `dflow doctor --ray HOST:PORT` checks" in errors
    all_gone(pids)

    run = ray.start("resume")
    pids = ray.pids()
    [driver] = [each for each in psutil.Process(run.pid).children(recursive=True) if each.num_threads() > 20]
    driver.kill()
    code, _, errors = finished(run)
    assert code == 1
    assert "r failed: HostLost: the stage's driver on the Ray cluster" in errors, errors
    all_gone(pids)

    run = ray.start("resume")
    pids = ray.pids()
    run.kill()
    run.communicate()
    all_gone(pids)

    result = ray.run("resume", "-s", "r.how=go")
    assert (result.returncode, ray.toy.text("r")) == (0, "2 ranks ['saved-0', 'saved-1']"), result.stderr


@pytest.mark.parametrize("is_reaped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_host_that_is_gone_ends_the_stage_and_one_that_joins_late_takes_its_place(is_reaped, tmp_path):
    with simulated_cluster(2) as cluster:
        ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
        run = ray.start("run", str(ray.toy.file), "-s", "r.how=wait")
        pids = ray.pids()
        if is_reaped:
            cluster.kill()
        else:
            os.kill(cluster.raylets[1], signal.SIGKILL)
        code, _, errors = finished(run)
        assert code == 1
        assert "r failed: HostLost: host " in errors
        all_gone(pids)

        resumed = ray.start("resume", "-s", "r.how=go")
        wait_for(lambda: len(list(ray.toy.store.glob("records/*/r.log"))) == 2)
        cluster.add()
        code, _, errors = finished(resumed)
        assert code == 0, errors
        assert ray.toy.text("r").startswith("2 ranks")  # the other host's rank may have saved its work


def test_a_lost_host_is_a_reason_to_try_again(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
    retried = ("-s", "r.launch.retries=1", "-s", "r.launch.retry_wait=0")
    run = ray.start("run", str(ray.toy.file), "-s", "r.how=wait", *retried)
    pids = ray.pids()
    actor_of(pids[1]).kill()
    again = ray.pids()
    all_gone(pids)
    run.send_signal(signal.SIGTERM)
    code, out, _ = finished(run)
    assert code == 143
    assert "r: HostLost: host 1 (" in out
    assert "; retry 1 of 1 in 0 s" in out
    all_gone(again)


SHARES = ("-s", "r.launch.hosts=1", "-s", "r.launch.threads=0", "-s", "r.launch.shard_workers=2")
ALL_SHARDS = " ".join(f"{number:04d}" for number in range(12))


def test_a_worker_of_a_cluster_that_is_killed_is_not_missed(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "shards"), cluster)
    run = ray.start("run", str(ray.toy.file), "-s", "r.how=wait", *SHARES)
    pids = ray.pids()
    actor_of(pids[0]).kill()
    code, _, errors = finished(run)
    assert (code, ray.toy.text("r")) == (0, ALL_SHARDS), errors
    all_gone(pids)


@pytest.mark.slow
def test_a_cluster_of_dflows_own_ends_with_the_run(tmp_path):
    toy = hosts_toy(tmp_path, "shards")
    with tempfile.TemporaryDirectory(prefix="s-") as short:  # it holds sockets, whose paths are limited
        result = toy.dflow("run", str(toy.file), "-s", "machine.cpus=2", *SHARES, TMPDIR=short)
        assert (result.returncode, toy.text("r")) == (0, ALL_SHARDS), result.stderr
        assert list(Path(short).glob("dflow-ray-*")) == []
        own = [each for each in psutil.process_iter(["cmdline"]) if short in " ".join(each.info["cmdline"] or [])]
        assert own == []


def test_more_hosts_than_a_cluster_has_are_refused_before_anything_runs(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
    result = ray.run("run", str(ray.toy.file), "-s", "r.launch.hosts=4")
    assert result.returncode == 2
    assert "node.r.launch.hosts: needs room for 4 parts, but the hosts of the cluster have room for 3" in result.stderr
    assert not list(ray.toy.store.glob("records/*"))


@pytest.mark.slow
def test_a_cluster_whose_head_is_gone_ends_its_stages_and_a_resume_finishes_elsewhere(cluster, tmp_path):
    with simulated_cluster(2) as gone:
        ray = OnRay(hosts_toy(tmp_path, "wait"), gone)
        run = ray.start("run", str(ray.toy.file), "-s", "r.how=wait")
        pids = ray.pids()
        for pid in gone.head:
            os.kill(pid, signal.SIGKILL)
        code, _, errors = finished(run)
        assert code == 1
        assert "r failed: HostLost: " in errors
        assert f"the head of the Ray cluster {gone.address} is gone" in errors
        all_gone(pids)
    ray = OnRay(ray.toy, cluster)
    result = ray.run("resume", "-s", "r.how=go")
    assert (result.returncode, ray.toy.text("r")) == (0, "2 ranks []"), result.stderr


def test_plan_shows_what_the_cluster_has_and_what_is_free(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
    del ray.environment["DFLOW_RAY_ADDRESS"]
    result = ray.run("plan", str(ray.toy.file), "--ray", cluster.address)
    shown = next(line for line in result.stdout.splitlines() if line.startswith("cluster"))
    assert re.fullmatch(
        f"cluster {cluster.address}: 3 hosts, 3 CPUs, 0 GPUs, [0-9.]+ GB; free now: [0-3] CPUs?, 0 GPUs, [0-9.]+ GB",
        shown,
    )
    own = json.loads(ray.run("plan", str(ray.toy.file), "--json", "-s", "machine.cpus=5").stdout)["cluster"]
    started = "cluster: one of dflow's own on this machine, started with the first node that needs it: 5 CPUs, "
    assert own[0].startswith(started)


def test_doctor_checks_the_hosts_of_a_cluster_and_who_can_use_it(cluster, tmp_path):
    pipeline = hosts_toy(tmp_path, "wait").file
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        found = list(cluster_findings(cluster.address, tmp_path / "runs", pipeline.parent, accepts_open=False))
        assert [(each.code, each.level) for each in found] == [
            (f"cluster {cluster.address}", "good"),
            ("authentication", "good"),
            ("hosts", "good"),
        ]
        assert found[0].what == "3 hosts, reached from here"
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_NUM_REDIS_GET_RETRIES", "2")
        [refused] = cluster_findings(cluster.address, tmp_path / "runs", pipeline.parent, accepts_open=False)
        assert "its token is missing or wrong here: set RAY_AUTH_MODE=token" in refused.what


def test_two_drivers_on_one_store_run_a_stage_once(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
    first = ray.start("run", str(ray.toy.file), "-s", "r.how=wait")
    pids = ray.pids()
    second = ray.start("run", str(ray.toy.file))  # `how` is no part of the key
    wait_for(lambda: len(list(ray.toy.store.glob("records/*/events.jsonl"))) == 2)
    time.sleep(2)
    assert all(map(is_alive, pids))
    first.send_signal(signal.SIGTERM)
    assert finished(first)[0] == 143
    assert finished(second)[0] == 0
    assert ray.toy.text("r") == "2 ranks ['saved-0', 'saved-1']"


@pytest.mark.slow
def test_a_stage_that_waits_for_room_says_what_is_free_and_what_it_needs(cluster, tmp_path):
    ray = OnRay(hosts_toy(tmp_path / "a", "wait"), cluster)
    first = ray.start("run", str(ray.toy.file), "-s", "r.how=wait")
    ray.pids()
    other = OnRay(hosts_toy(tmp_path / "b", "wait"), cluster)
    second = other.start("run", str(other.toy.file))
    waiting = f"waiting for room in the cluster {cluster.address}: needs 2 x (1 CPU, 0 GPUs); free: "

    def times_waiting() -> int:
        return sum(path.read_text().count(waiting) for path in other.toy.store.glob("records/*/r.log"))

    wait_for(lambda: times_waiting() == 1)
    [actors] = other.toy.store.glob("work/*/actors-*.json")
    second.send_signal(signal.SIGTERM)
    assert finished(second)[0] == 143
    assert not actors.exists()  # nothing of it runs, so that gc need not keep its work

    del other.environment["DFLOW_RAY_ADDRESS"]  # the record names the cluster
    second = other.start("resume")
    wait_for(lambda: times_waiting() == 2)
    first.send_signal(signal.SIGTERM)
    finished(first)
    code, out, errors = finished(second)
    assert code == 0, errors
    assert f"r: {waiting}" in out


@pytest.mark.slow
def test_the_ranks_see_the_gpus_that_the_cluster_gives_them_and_a_timeout_counts_from_then(tmp_path):
    with simulated_cluster(2, gpus=2) as cluster:
        ray = OnRay(hosts_toy(tmp_path, "wait"), cluster)
        one_each = ("-s", "r.launch.device=auto", "-s", "r.launch.gpus=1", "-s", "r.launch.timeout=40")
        result = ray.run("run", str(ray.toy.file), "-s", "r.how=wait", *one_each)
        assert result.returncode == 1
        assert "r failed: " in result.stderr and "40 s" in result.stderr, result.stderr
        all_gone(ray.pids())
        record = next(ray.toy.store.glob("records/*"))
        seen = [(record / name).read_text() for name in ("r.log", "r.host-1.log")]
        assert [re.findall(r"rank (\d) sees GPUs '(\d)'", text) for text in seen] == [[("0", "0")], [("1", "0")]]

        result = ray.run("resume", "-s", "r.how=go", "-s", "r.launch.gpus=0", "-s", "r.launch.timeout=0")
        assert result.returncode == 0, result.stderr
        last = max(ray.toy.store.glob("records/*/r.log"))
        assert "rank 0 sees GPUs ''" in last.read_text()


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()


@pytest.fixture(scope="module")
def wide_cluster() -> Iterator[SimulatedCluster]:
    with simulated_cluster(3, cpus=2) as simulated:
        yield simulated


@pytest.mark.slow
def test_a_pipeline_whose_nodes_all_run_on_a_cluster_makes_the_same_artifacts(wide_cluster, tmp_path):
    """And four ranks on two hosts train as four on one, to the last bit."""
    here, there = Toy(tmp_path / "a"), Toy(tmp_path / "b")
    text = (PROJECT / "pipelines" / "tiny.toml").read_text()
    here.file.write_text(text)
    there.file.write_text(re.sub(r"(?m)^(op = .*)$", r'\1\nlaunch = { kind = "ray" }', text))
    untracked = ("-s", "mlflow.tracking=false")
    assert here.dflow("run", str(here.file), *untracked).returncode == 0
    ray = OnRay(there, wide_cluster)
    result = ray.run("run", str(there.file), *untracked)
    assert result.returncode == 0, result.stderr
    digests = [{name: node["digest"] for name, node in toy.state()["nodes"].items()} for toy in (here, there)]
    assert digests[0] == digests[1]

    on_hosts = 'train.launch={kind="ray",nproc=2,hosts=2,sp_degree=2,threads=1}'
    on_one = 'train.launch={kind="ranks",nproc=4,sp_degree=2,threads=1}'
    assert (
        ray.run("run", str(there.file), "--to", "train", *untracked, "-s", "train.seed=2", "-s", on_hosts).returncode
        == 0
    )
    assert (
        here.dflow("run", str(here.file), "--to", "train", *untracked, "-s", "train.seed=2", "-s", on_one).returncode
        == 0
    )
    losses = [toy.state()["nodes"]["train"]["metrics"]["train/loss"] for toy in (here, there)]
    assert losses[0] == losses[1]
