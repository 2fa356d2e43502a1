"""What a host reports of itself, so that a cluster's hosts can be compared with this machine."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

from attrs import frozen

from dsl.imports import PROJECT


@frozen(kw_only=True)
class HostFacts:
    """What a host reports. ray, python: versions; sources: dflow's digest; problem: why it reports nothing else."""

    name: str
    ray: str = ""
    python: str = ""
    sources: str = ""
    unseen: tuple[str, ...] = ()
    problem: str = ""


def digest_of_sources() -> str:
    """SHA-256 of dflow's own Python files."""
    digest = hashlib.sha256()
    for room in ("dsl", "executor", "ops"):
        for file in sorted((PROJECT / room).rglob("*.py")):
            digest.update(f"{file.relative_to(PROJECT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def host_facts(name: str, paths: tuple[str, ...] = ()) -> HostFacts:
    """The facts of this host, whose name it is; paths: what it has to see."""
    unseen = tuple(path for path in paths if not Path(path).exists())
    python, ray = platform.python_version(), metadata.version("ray")
    return HostFacts(name=name, ray=ray, python=python, sources=digest_of_sources(), unseen=unseen)
