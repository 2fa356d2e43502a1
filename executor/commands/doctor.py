"""`dflow doctor`: check what works on this machine, and what to install for the rest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attrs import evolve

from dsl.errors import ConfigError, PipelineError
from dsl.finding import Finding, Level
from dsl.launch import OWN_CLUSTER, Machine
from dsl.read_toml import read_graph, tracking_uri_of
from dsl.secrets import resolved_text
from executor.commands.arguments import add_json, add_ray, add_store
from executor.doctor.host import host_findings
from executor.doctor.libraries import loaded_findings, start_probes, version_findings
from executor.doctor.storage import storage_findings
from executor.doctor.tracking import tracking_findings
from executor.launchers.cluster_address import accepts_open, cluster_address, use_cluster
from executor.store.artifact_store import store_path
from executor.system.output import FAILED, OK, USAGE, print_json, print_lines
from executor.system.progress import Activity

SHOWN: Mapping[Level, str] = {"good": "ok", "error": "missing", "fatal": "missing"}
PIPELINE = "pipeline"  # the name of a finding of the file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a pipeline, whose mistakes, store and MLflow server are checked",
    )
    add_json(parser)
    add_store(parser)
    add_ray(parser)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where dflow cannot run at all, 2 where the file has mistakes. A library that only some ops need does
    not change it.
    """
    use_cluster(options.ray)
    findings = []
    with Activity() as activity:
        for finding in _findings(options, lambda what: activity.status(f"checking {what}")):
            findings.append(finding)
            if not options.json:
                activity.show(f"{SHOWN.get(finding.level, finding.level):7}  {finding.code}: {finding}")
    fatal = any(finding.level == "fatal" for finding in findings)
    if options.json:
        print_json({"runs": not fatal, "findings": [each.to_json() for each in findings]})
    elif fatal:
        print_lines("dflow cannot run here until that is fixed", error=True)
    if fatal:
        return FAILED
    return USAGE if any(finding.code == PIPELINE for finding in findings) else OK


def _findings(options: argparse.Namespace, check: Callable[[str], None]) -> Iterator[Finding]:
    """Slow probes run in the background; their findings come last.

    Raises PipelineError where there is no such file.
    """
    machine = Machine()
    if options.file is not None:
        try:
            machine = read_graph(options.file, [], []).machine
        except PipelineError as error:
            if not options.file.is_file():
                raise
            yield from (evolve(mistake, code=PIPELINE) for mistake in error.mistakes)
    probes = start_probes()
    check("this machine and its libraries")
    yield from version_findings()
    yield from host_findings()
    check("the store and MLflow")
    store = store_path(options.store, options.file)
    yield from storage_findings(store)
    yield from _mlflow_findings(store, options.file)
    if (address := cluster_address(machine)) != OWN_CLUSTER:
        from executor.doctor.cluster import cluster_findings

        check(f"the Ray cluster {address}")
        project = options.file.parent if options.file is not None else Path.cwd()
        yield from cluster_findings(address, store, project, accepts_open=accepts_open(machine))
    check(f"{', '.join(probes) or 'the libraries'}: imported, which takes a while")
    yield from loaded_findings(probes)


def _mlflow_findings(store: Path, file: Path | None) -> Iterator[Finding]:
    """A file with mistakes counts too, where its tracking address can be read."""
    try:
        uri = _tracking_uri(file) if file is not None else None
        resolved = None if uri is None else resolved_text(uri)
    except PipelineError:
        yield Finding(f"not checked: its settings in {file} have mistakes", level="warning", code="MLflow")
    except ConfigError as error:
        yield Finding(f"not checked: {error}", code="MLflow")
    else:
        yield from tracking_findings(store, resolved)


def _tracking_uri(file: Path) -> str | None:
    return tracking_uri_of(file) if file.suffix == ".toml" else read_graph(file, [], []).tracking_uri
