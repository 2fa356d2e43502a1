"""Which Ray cluster the nodes with kind = "ray" use: by `--ray`, by DFLOW_RAY_ADDRESS, else by `[machine]`."""

from __future__ import annotations

import os

import attrs

from dsl.errors import Mistake, PipelineError
from dsl.graph import Graph
from dsl.launch import Machine, cluster_mistake

ADDRESS_VARIABLE = "DFLOW_RAY_ADDRESS"


def use_cluster(address: str | None) -> None:
    """Set the variable of this process to the value of `--ray`, if there is one.

    Raises PipelineError where that, or the variable's own value, names no cluster.
    """
    if address is not None:
        _check(address, "--ray")
        os.environ[ADDRESS_VARIABLE] = address
    elif variable := os.environ.get(ADDRESS_VARIABLE):
        _check(variable, ADDRESS_VARIABLE)


def cluster_address(machine: Machine) -> str:
    """ "local", or the address of the cluster's head. Raises PipelineError for another text in the variable."""
    use_cluster(None)
    return os.environ.get(ADDRESS_VARIABLE) or machine.ray


def with_cluster(graph: Graph) -> Graph:
    """The graph with the address that its nodes use now, so that a resume of its record uses it too."""
    if all(node.launch.kind != "ray" for node in graph.nodes.values()):
        return graph
    return attrs.evolve(graph, machine=attrs.evolve(graph.machine, ray=cluster_address(graph.machine)))


def _check(address: str, source: str) -> None:
    if mistake := cluster_mistake(address):
        raise PipelineError([Mistake(mistake, source)])
