"""`dflow doctor`: check what works on this machine, and say what to install for what does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from dsl.read_toml import read_graph
from dsl.secrets import resolved_text
from executor.commands.arguments import add_json, add_store
from executor.doctor.finding import Finding
from executor.doctor.host import host_findings
from executor.doctor.libraries import loaded_findings, start_probes, version_findings
from executor.doctor.storage import storage_findings
from executor.doctor.tracking import tracking_findings
from executor.exits import FAILED, OK
from executor.lines import print_json, print_lines
from executor.progress import Doing
from executor.store import store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="a pipeline, whose store and MLflow server are looked at"
    )
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where dflow cannot run at all; what some ops lack only is told."""
    findings = []
    with Doing() as doing:
        for finding in _findings(options, lambda what: doing.tell(f"looking at {what}")):
            findings.append(finding)
            if not options.json:
                doing.say(str(finding))
    fatal = any(finding.is_fatal for finding in findings)
    if options.json:
        print_json({"runs": not fatal, "findings": [attrs.asdict(each) for each in findings]})
    elif fatal:
        print_lines("dflow cannot run here before that is mended", error=True)
    return FAILED if fatal else OK


def _findings(options: argparse.Namespace, look_at: Callable[[str], None]) -> Iterator[Finding]:
    """What takes seconds goes on beside the rest, and is told last."""
    uri = None if options.file is None else read_graph(options.file, [], []).tracking_uri
    probes = start_probes()
    look_at("this machine, and which libraries are installed")
    yield from version_findings()
    yield from host_findings()
    look_at("the store and MLflow")
    store = store_path(options.store, options.file)
    yield from storage_findings(store)
    yield from tracking_findings(store, None if uri is None else resolved_text(uri))
    look_at(f"{', '.join(probes) or 'the libraries'}: loaded to see whether they work, which takes a while")
    yield from loaded_findings(probes)
