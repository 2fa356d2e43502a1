"""`dflow doctor`: check what works on this machine, and what to install for the rest.

Instead of that, --verify checks the store's artifacts, --backends whether both capture backends give the same states,
and --target what holds of a target.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import evolve, fields

from dsl.errors import ConfigError, DataError, PipelineError, StoreError
from dsl.finding import Finding, Level
from dsl.launch import OWN_CLUSTER, Machine
from dsl.read_toml import read_graph, tracking_uri_of
from dsl.secrets import resolved_text
from executor.commands.arguments import (
    add_json,
    add_overrides,
    add_ray,
    add_store,
    add_trust,
    check_store,
    open_store,
)
from executor.doctor.machine import host_findings, loaded_findings, start_probes, version_findings
from executor.doctor.store import storage_findings, tracking_findings
from executor.launchers.cluster_address import accepts_open, cluster_address, use_cluster
from executor.records.run_record import Record, find_record, newest_records
from executor.store.artifact_store import Store, store_path
from executor.store.integrity import artifact_digests, check, set_aside
from executor.system.output import FAILED, OK, USAGE, counted, print_json, print_lines, shown_digest
from executor.system.progress import Activity, BytesDone
from executor.system.symlinks import folder_size
from executor.system.trust import is_own_store

SHOWN: Mapping[Level, str] = {"good": "ok", "error": "missing", "fatal": "missing"}
PIPELINE = "pipeline"  # the name of a finding of the file
SAMPLES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a pipeline, whose mistakes, store and MLflow server are checked",
    )
    parser.add_argument(
        "--verify",
        nargs="*",
        metavar="RUN",
        help="instead find damaged artifacts, and take them out of use: those that these runs use, or all of the store",
    )
    parser.add_argument(
        "--backends",
        action="store_true",
        help="instead capture a few samples of FILE with transformers and with SGLang, and compare",
    )
    parser.add_argument(
        "--target",
        metavar="CHECKPOINT",
        help="instead measure what holds of a checkpoint directory or a model id: on a small random copy of its "
        "config.json, and on its weights, if the checkpoint is whole and half of the free memory holds them",
    )
    parser.add_argument(
        "--measure-minutes",
        type=float,
        metavar="M",
        help="with --target: the longest time for the weights, by an estimate; if all checks take longer, only layers, "
        "head and embedding are measured on them; default: that of load_target",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="with --verify: read every file, including unchanged files that were verified before",
    )
    parser.add_argument("--quick", action="store_true", help="with --verify: check only names and sizes")
    parser.add_argument("--node", metavar="NODE", help="with --backends: the capture node; default: all of them")
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"with --backends: the number of samples; default: {SAMPLES}"
    )
    add_overrides(parser)
    add_json(parser)
    add_store(parser)
    add_trust(parser)
    add_ray(parser)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where dflow cannot run at all, something is damaged, the backends disagree, or a check of the target
    fails at any length; 2 where the file has mistakes. A library that only some ops need does not change it.
    """
    _refuse_unused(options)
    if options.verify is not None:
        return _verify(options)
    if options.backends:
        return _compare_backends(options)
    if options.target is not None:
        return _probe_target(options)
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
    """All findings about machine, store and cluster; slow probes run in the background, and come last.

    Raises PipelineError where the pipeline file does not exist.
    """
    machine = Machine()
    if options.file is not None:
        try:
            machine = read_graph(options.file, options.set, []).machine
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
    """Findings on the MLflow server of a pipeline file, or of the store without one.

    The server is checked even if the file has mistakes, as long as the tracking address can be read.
    """
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


def _refuse_unused(options: argparse.Namespace) -> None:
    """Raises PipelineError for options that exclude each other, or that the chosen check does not have."""
    is_verify, is_comparison = options.verify is not None, options.backends
    is_probe = options.target is not None
    wrong = []
    if is_verify and is_comparison:
        wrong.append("--verify and --backends are two checks: give one of them")
    if is_probe and (is_verify or is_comparison or options.file is not None or options.ray):
        wrong.append("--target measures a checkpoint: give it without FILE, --verify, --backends and --ray")
    if options.full and options.quick:
        wrong.append("--full reads every file, --quick none: give one of them")
    if options.ray and (is_verify or is_comparison):
        wrong.append("--ray goes with the check of this machine, not with --verify or --backends")
    if options.set and options.file is None:
        wrong.append("-s changes a value of a pipeline: give its FILE")
    if not is_probe and options.measure_minutes is not None:
        wrong.append("--measure-minutes goes with --target")
    if not is_verify and (options.full or options.quick):
        wrong.append("--full and --quick go with --verify")
    if not is_comparison and (options.node is not None or options.samples is not None):
        wrong.append("--node and --samples go with --backends")
    if is_comparison and options.file is None:
        wrong.append("--backends compares the capture nodes of a pipeline: give its FILE")
    if is_verify and options.json:
        wrong.append("--verify has no --json")
    if wrong:
        raise PipelineError(list(map(Finding, wrong)))


def _verify(options: argparse.Namespace) -> int:
    """Run `dflow doctor --verify`: find artifacts that were damaged after their commit, and take them out of use."""
    store = open_store(options)
    records = [find_record(store.records, run) for run in options.verify]
    used = (node.digest for record in records for node in record.state.nodes.values())
    digests = list(dict.fromkeys(filter(None, used))) if records else artifact_digests(store)
    total = 0 if options.quick else sum(folder_size(store.object_path(digest)) for digest in digests)
    unread: list[str] = []
    with BytesDone("verify", total) as done:
        damages = check(
            store,
            digests,
            read_all=options.full,
            sizes_only=options.quick,
            progress=done.advance,
            on_unread=unread.append,
        )
    depth = "by name and size" if options.quick else "by content"
    if unread:
        depth += f"; {counted(len(unread), 'file')} not read again, unchanged since you verified them: --full reads all"
    if not damages:
        unchanged = "is unchanged" if len(digests) == 1 else "are unchanged"
        print_lines(f"{counted(len(digests), 'artifact')} {unchanged} ({depth})")
        return OK
    _take_out_of_use(store, damages)
    are = "is" if len(damages) == 1 else "are"
    print_lines(f"{len(damages)} of {counted(len(digests), 'artifact')} {are} damaged ({depth})", error=True)
    return FAILED


def _take_out_of_use(store: Store, damages: Mapping[str, Sequence[Finding]]) -> None:
    """Print every damaged file, and how to rebuild its artifact; in the user's own store, set these artifacts aside."""
    records = list(newest_records(store.records))
    for digest, found in damages.items():
        for damage in found:
            print_lines(str(damage), error=True)
        print_lines(f"{shown_digest(digest)}: {_rebuilt_by(records, digest)}", error=True)
    if not is_own_store(store.path):
        return
    try:
        set_aside(store, damages)
    except StoreError as error:
        print_lines(f"dflow: {error}", error=True)


def _rebuilt_by(records: Sequence[Record], digest: str) -> str:
    """The command that rebuilds an artifact, from the newest run that computed it."""
    for record in records:
        for node_id, node in record.state.nodes.items():
            if node.digest == digest and node_id not in record.state.pinned:
                return f'node "{node_id}" of {record.state.pipeline}; rebuild it with `dflow resume {record.run}`'
    return "no run of this store computed it; `dflow pull` may fetch it again"


def _probe_target(options: argparse.Namespace) -> int:
    """Measure a small random copy of a target, and its weights if they are there, in a process of its own, and print
    each check.
    """
    from ops.lib.target.probed import STARTING, measured_target
    from ops.load_target.op import LoadTarget
    from ops.tools.init.target import measurable

    found = measurable(options.target)
    kind = found.config.get("model_type")
    minutes = options.measure_minutes
    if minutes is None:
        minutes = fields(LoadTarget).measure_minutes.default
    with Activity() as activity:
        activity.status(STARTING)
        try:
            measured = measured_target(found.config, found.directory, minutes, activity.detail)
        except DataError as error:
            raise DataError(f"{options.target}: {error}") from error
    notes = [*measured.notes, *found.notes]
    together = measured.together
    if options.json:
        print_json({"model_type": kind, "probes": [probe.to_json() for probe in measured.probes], "notes": notes})
    else:
        for probe in measured.probes:
            print_lines(f"{options.target}: {kind}, measured on {probe.on}")
            for name, result, what in probe.rows():
                print_lines(f"{name:12} {result:6} {what}")
        print_lines(f"{'so':19} {together.verdict}")
        for note in notes:
            print_lines(f"note: {note}")
    return OK if together.is_usable else FAILED


def _compare_backends(options: argparse.Namespace) -> int:
    """Run `dflow doctor --backends`: compare the states of transformers and SGLang for each capture node."""
    from executor.model_tools.measure import compare
    from ops.tools.compare_backends.text import comparison_text

    graph = read_graph(options.file, options.set)
    store = open_store(options)
    check_store(options, store.path)
    compared = compare(store, graph, options.node, SAMPLES if options.samples is None else options.samples)
    if options.json:
        print_json({"nodes": compared})
    else:
        for each in compared:
            print_lines(comparison_text(each))
    return OK if all(each["agree"] for each in compared) else FAILED
