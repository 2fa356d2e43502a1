"""A Ray cluster: whether it can be used from here, who else can use it, and whether all its hosts can run stages."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from dsl.errors import StageError
from dsl.finding import Finding
from executor.launchers.hosts import HERE, HostFacts, host_facts, host_faults
from executor.launchers.ray_cluster import check_hosts, is_open

IS_IT_RUNNING = "is its head running, with the version of Ray that is here?"
AUTHENTICATION = "start Ray on every host with RAY_AUTH_MODE=token and the same token: see docs/cluster.md"


def cluster_findings(address: str, store: Path, project: Path, *, accepts_open: bool) -> Iterator[Finding]:
    """Check a Ray cluster and its hosts, and yield findings.

    address: "host:port" of its head. accepts_open: whether it may let anyone in. store: need not exist yet. project:
    the folder of the pipeline and its data.
    """
    name = f"cluster {address}"
    if importlib.util.find_spec("ray") is None:
        yield Finding("not checked, since Ray is not installed here", advice='pip install "dflow[ray]"', code=name)
        return
    try:
        authentication = _authentication(address, accepts_open)
    except StageError as error:
        yield Finding(str(error), advice=IS_IT_RUNNING, code=name)
        return
    if authentication.level == "error":  # a process that joins it runs what others send it
        yield authentication
        return
    place = next(here for here in (store, *store.parents) if here.exists()).resolve()
    try:
        with tempfile.NamedTemporaryFile(prefix=".dflow-doctor-", dir=place) as fresh:
            hosts = check_hosts(address, Path(fresh.name), project.resolve())
    except OSError as error:
        yield Finding(f"not checked, since {place} cannot be written ({error.strerror})", code=name)
    except StageError as error:
        yield Finding(str(error), advice=IS_IT_RUNNING, code=name)
    else:
        yield Finding(f"{len(hosts)} host{'s' * (len(hosts) != 1)}, reached from here", level="good", code=name)
        yield authentication
        yield from host_findings(hosts, place, project.resolve())


def _authentication(address: str, accepts_open: bool) -> Finding:
    name = "authentication"
    if is_open(address):
        message = f"{address} accepts connections without a token: whoever reaches it can run code there"
        return Finding(message, advice=AUTHENTICATION, level="warning" if accepts_open else "error", code=name)
    return Finding(f"{address} refuses connections without its token", level="good", code=name)


def host_findings(hosts: tuple[HostFacts, ...], store: Path, project: Path) -> Iterator[Finding]:
    """Findings on how the hosts of a cluster differ from this one; a single good finding where none differs."""
    here = host_facts(HERE)
    faulty = False
    for host in hosts:
        unseen = tuple(str(store) if Path(path).parent == store else path for path in host.unseen)
        for message, remedy in host_faults(attrs.evolve(host, unseen=unseen), here):
            faulty = True
            yield Finding(message, advice=remedy, code=f"host {host.name}")
    if not faulty:
        same = f"this dflow, Python {here.python} and Ray {here.ray}"
        yield Finding(f"all of them see {store} and {project}, and run {same}", level="good", code="hosts")
