"""Which Ray cluster the nodes with kind = "ray" use: by `--ray`, by DFLOW_RAY_ADDRESS, else by `[machine]`.

Whoever joins a cluster sends it his token, and runs what it answers. So one that only a record or another file of a
store names is used if the user has used it before. One that lets anyone in is used if the user says so: by `[machine]
ray_without_authentication` for the cluster of that table, or by its address in a variable.
"""

from __future__ import annotations

import os

import attrs

from dsl.errors import ClusterError, PipelineError
from dsl.finding import Field, Finding
from dsl.graph import Graph
from dsl.launch import OWN_CLUSTER, Machine, cluster_mistake
from executor.system.trust import is_trusted, trust

ADDRESS_VARIABLE = "DFLOW_RAY_ADDRESS"
OPEN_VARIABLE = "DFLOW_RAY_WITHOUT_AUTHENTICATION"
USED, USED_OPEN = "Ray cluster", "Ray cluster without authentication"  # what the user's list of trust calls them


def use_cluster(address: str | None) -> None:
    """Set this process's cluster variable to the value of `--ray`, if given.

    Raises PipelineError where the option, or the variable's own value, is no cluster.
    """
    if address is not None:
        _check(address, "--ray")
        os.environ[ADDRESS_VARIABLE] = address
    elif variable := os.environ.get(ADDRESS_VARIABLE):
        _check(variable, ADDRESS_VARIABLE)


def cluster_address(machine: Machine) -> str:
    """The cluster to use: "local", or the address of its head. Raises PipelineError for an invalid variable."""
    use_cluster(None)
    return os.environ.get(ADDRESS_VARIABLE) or machine.ray


def accepts_open(machine: Machine) -> bool:
    """Whether the user accepts a cluster that lets anyone in."""
    address = cluster_address(machine)
    by_table = machine.ray_without_authentication and machine.ray == address
    return by_table or os.environ.get(OPEN_VARIABLE) == address


def remember_cluster(machine: Machine) -> None:
    """Remember that the user used this cluster, so that a run's record may use it again."""
    address = cluster_address(machine)
    trust(USED, address)
    if accepts_open(machine):
        trust(USED_OPEN, address)


def recorded_machine(machine: Machine) -> Machine:
    """A record's machine table with the cluster to use. Raises ClusterError if only the record names that cluster."""
    named = os.environ.get(ADDRESS_VARIABLE)
    if not named and machine.ray != OWN_CLUSTER and not is_trusted(USED, machine.ray):
        raise ClusterError(
            f"only the run's record names the Ray cluster {machine.ray}, which was not used from here; if it is yours, "
            f"give --ray {machine.ray}"
        )
    accepted = machine.ray_without_authentication and is_trusted(USED_OPEN, machine.ray)
    return attrs.evolve(machine, ray_without_authentication=accepted)


def with_cluster(graph: Graph) -> Graph:
    """The graph with the cluster address in use now, so that a resumed run uses the same cluster."""
    if not uses_cluster(graph):
        return graph
    address, is_open = cluster_address(graph.machine), accepts_open(graph.machine)
    return attrs.evolve(graph, machine=attrs.evolve(graph.machine, ray=address, ray_without_authentication=is_open))


def with_recorded_cluster(graph: Graph) -> Graph:
    """A record's graph, with the cluster that `recorded_machine` allows."""
    return attrs.evolve(graph, machine=recorded_machine(graph.machine)) if uses_cluster(graph) else graph


def uses_cluster(graph: Graph) -> bool:
    return any(node.launch.kind == "ray" for node in graph.nodes.values())


def _check(address: str, source: str) -> None:
    if mistake := cluster_mistake(address):
        raise PipelineError([Finding(mistake, Field(source))])
