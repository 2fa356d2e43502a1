"""What the end of a part on one host means for the others and for the stage, and which parts fit on a cluster."""

from __future__ import annotations

import signal
from pathlib import Path

import attrs
import pytest
from test_placement import graph

from dsl.graph import GraphNode
from dsl.launch import Launch
from executor.launchers.backend import HostExit, StageOrder, exits_path
from executor.launchers.hosts import ExitsByHost
from executor.launchers.ray_backend import ClusterCapacity
from executor.launchers.stage_contract import RankExit, lost_workers, write_exits
from executor.system.resource_pool import Capacity, Demand, Share
from executor.system.supervisor import GONE

SMALL, LARGE, HEAD = (Capacity(cpus, 64 * 2**30, gpus) for cpus, gpus in ((8, ("0",)), (64, ("0", "1")), (4, ())))


def order(folder: Path, launch: Launch) -> StageOrder:
    paths = dict.fromkeys(("job", "folder", "results", "events", "private", "log", "directory"), folder)
    return StageOrder(node="n", job_digest="", attempt=1, launch=launch, share=Share(1), part=Demand(1), **paths)


def node_with(folder: Path, op: str = "compute", **launch: int) -> GraphNode:
    node = graph(folder, 'kind = "ray"', op).nodes["n"]
    return attrs.evolve(node, launch=Launch(kind="ray", **launch))


def refused(folder: Path, cluster: tuple[Capacity, ...], **launch: int) -> list[str]:
    return [str(mistake) for mistake in ClusterCapacity.of(cluster).mistakes(node_with(folder, **launch))]


@pytest.mark.parametrize(
    ("launch", "hosts", "op", "part"),
    [
        ({}, (HEAD, SMALL), "compute", Demand(8, 0, 1)),  # not on the head, which has no GPU
        ({}, (SMALL, LARGE), "compute", Demand(64, 0, 1)),  # a whole host, the largest
        ({"hosts": 2}, (SMALL, LARGE, SMALL), "compute", Demand(8, 0, 1)),  # the largest of which two fit
        ({"hosts": 2, "threads": 4}, (SMALL, LARGE), "compute", Demand(4, 0, 1)),
        ({"shard_workers": 4, "gpus": 0}, (LARGE, LARGE), "compute", Demand(32, 0, 0)),  # two on each host
        ({"hosts": 2, "gpus": 0}, (HEAD, LARGE, HEAD), "compute", Demand(4, 0, 0)),
        ({"shard_workers": 4, "cpus": 8}, (SMALL, LARGE), "read", Demand(8, 0, 0)),
    ],
)
def test_a_part_takes_of_its_host_what_lets_all_parts_fit(tmp_path, launch, hosts, op, part):
    node = node_with(tmp_path, op, **launch)
    assert ClusterCapacity.of(hosts).part(node) == part
    assert ClusterCapacity.of(hosts).mistakes(node) == []


def test_what_never_fits_is_refused(tmp_path):
    assert refused(tmp_path, (SMALL, LARGE), hosts=2, gpus=2) == [
        "node.n.launch.hosts: needs room for 2 parts, but the hosts of the cluster have room for 1 (set hosts = 1, or "
        "fewer cpus, threads or gpus for each; or add hosts)"
    ]
    [mistake] = refused(tmp_path, (SMALL, LARGE), gpus=3)
    assert mistake.startswith("node.n.launch.gpus: needs 3 GPUs, but the run may use only 2 GPUs")


def test_a_failed_part_ends_the_others_and_the_first_code_is_the_stages(tmp_path):
    parts = ExitsByHost(order(tmp_path, Launch(kind="ray", hosts=3)), ["a", "b", "c"])
    parts.ended(0, HostExit(code=0))
    assert not parts.ends_others
    parts.ended(2, HostExit(code=3, log_errno=28))
    assert parts.ends_others
    parts.lost(1, "it left")
    assert parts.exit() == HostExit(
        code=3,
        hosts=("a", "b", "c"),
        lost="host 1 (b): it left",
        failed="the processes on host 2 (c): the first ended with exit code 3",
        log_errno=28,
    )


@pytest.mark.parametrize("launch", [Launch(kind="ray", hosts=2), Launch(kind="ray", shard_workers=2)])
def test_an_error_of_a_host_ends_the_other_parts_too(tmp_path, launch):
    parts = ExitsByHost(order(tmp_path, launch), "ab")
    parts.ended(1, HostExit(code=None, error="StageError: no process"))
    assert parts.ends_others
    parts.ended(0, HostExit(code=-signal.SIGTERM))
    assert (parts.exit().error, parts.exit().lost) == ("host 1 (b): StageError: no process", "")


def test_workers_go_on_without_one_that_was_killed_or_left_and_not_after_an_error(tmp_path):
    parts = ExitsByHost(order(tmp_path, Launch(kind="ray", shard_workers=4)), "abcd")
    write_exits(exits_path(tmp_path, 0), [RankExit(0, -signal.SIGKILL, 0.0)])
    parts.ended(0, HostExit(code=1))
    write_exits(exits_path(tmp_path, 1), [RankExit(1, GONE, 0.0)])  # it saw that it is lost
    parts.lost(1, "it left")
    assert not parts.ends_others
    assert lost_workers(tmp_path) == {0, 1}
    write_exits(exits_path(tmp_path, 2), [RankExit(2, 1, 0.0)])
    parts.ended(2, HostExit(code=1))
    assert parts.ends_others
    parts.ended(3, HostExit(code=0))
    assert parts.exit().code == 0
