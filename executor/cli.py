"""The `dflow` command."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from attrs import NOTHING

from dsl.errors import DflowError, Mistake, PipelineError, StoreError, did_you_mean
from dsl.graph import Graph
from dsl.op import OpSpec, type_name
from dsl.op_table import all_ops, load_op
from dsl.read_toml import read_graph
from executor.begin import Session, make_planner, new_run, resumed_run, run_from
from executor.compare import compare
from executor.follow import send_in_foreground
from executor.keys import PROJECT
from executor.plan import Decision
from executor.port import require_free_port
from executor.record import find_record, mlflow_ids
from executor.resources import free_bytes, graph_resources, resources_row
from executor.run import run_session
from executor.store import Store, store_path
from executor.table import make_display, print_lines, print_plan, print_resources, print_results
from executor.unmet import unmet

OK, FAILED, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. Exit code 0 where all is well, 1 after a failure, 2 for a mistake in usage or in a pipeline."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, extra = _for_sglang(given)
    options = _parser().parse_args(own)
    options.extra = extra
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        _check_not_shadowed()
        return command(options)
    except PipelineError as error:
        print_lines(str(error), error=True)
        return USAGE
    except DflowError as error:
        print_lines(f"dflow: {error}", error=True)
        return FAILED


def run(options: argparse.Namespace) -> int:
    graph = read_graph(options.file, options.set)
    store = Store.open(store_path(options.store, options.file), write=True)
    return _run(new_run(store, graph))


def resume(options: argparse.Namespace) -> int:
    find_record(Store.open(store_path(options.store, None), write=False).records, options.run)
    store = Store.open(store_path(options.store, None), write=True)
    if options.start is not None:
        if options.adopt:
            hint = "--from starts with empty work folders; leave --adopt out"
            raise PipelineError([Mistake("--adopt goes on with unfinished work, --from does not", hint=hint)])
        return _run(run_from(store, options.run, options.start, options.set))
    session = resumed_run(store, options.run, options.set)
    if all(node.state == "done" for node in session.record.state.nodes.values()):
        print_lines(f"run {session.record.run} is complete: nothing to do")
    return _run(session, adopt=options.adopt)


def plan(options: argparse.Namespace) -> int:
    graph = read_graph(options.file, options.set)
    store = Store.open(store_path(options.store, options.file), write=False)
    decisions = make_planner(store, graph).plan()
    missing = [str(each) for each in unmet(graph, decisions)]
    rows = _plan_rows(graph, decisions)
    made = {row["id"]: store.object_path(row["digest"]) for row in rows if row["cache"] == "hit"}
    free_disk = free_bytes(store.path)
    needs = graph_resources(graph, made, free_disk)
    if options.json:
        told = {node_id: resources_row(need) for node_id, need in needs.items()}
        whole = {"pipeline": graph.name, "nodes": rows, "resources": told, "free_disk": free_disk, "unmet": missing}
        print_lines(json.dumps(whole, indent=1))
    else:
        print_plan(rows, missing)
        print_resources(graph, needs, free_disk, store.path)
    return OK


def explain(options: argparse.Namespace) -> int:
    graph = read_graph(options.file, options.set)
    store = Store.open(store_path(options.store, options.file), write=False)
    rows = {row["id"]: row for row in _plan_rows(graph, make_planner(store, graph).plan())}
    if options.node not in rows:
        hint = did_you_mean(options.node, list(rows)) or f"nodes: {', '.join(rows)}"
        print_lines(f'there is no node "{options.node}" ({hint})', error=True)
        return USAGE
    row = rows[options.node]
    if row["cache"] == "hit":
        print_lines(f"{options.node}: cached as {row['digest']}")
        return OK
    print_lines(f"{options.node} {'may run' if row['cache'] == 'maybe' else 'runs'}:")
    for reason in row["reason"].split("; "):
        print_lines(f"  {reason}")
    return OK


def compare_backends(options: argparse.Namespace) -> int:
    """Exit code 1 where the backends disagree."""
    graph = read_graph(options.file, options.set)
    store = Store.open(store_path(options.store, options.file), write=False)
    compared = compare(store, graph, options.node, options.samples)
    if options.json:
        print_lines(json.dumps({"nodes": [each.result for each in compared]}, indent=1))
    else:
        for each in compared:
            print_lines(each.lines())
    return OK if all(each.agree for each in compared) else FAILED


def status(options: argparse.Namespace) -> int:
    store = Store.open(store_path(options.store, None), write=False)
    record = find_record(store.records, options.run)
    state = record.state
    if state.status == "running" and not record.is_alive():
        state.status = "stopped"
        for node in state.nodes.values():
            node.state = "pending" if node.state == "running" else node.state
    if options.json:
        mlflow = mlflow_ids(store.records, record)
        graph = record.graph()
        nodes = [
            {
                "id": node_id,
                "op": graph.nodes[node_id].op.name,
                "key": node.key,
                "digest": node.digest,
                "state": node.state,
                "cache": node.cache,
                "reason": node.error or node.reason,
                "seconds": node.seconds,
                "mlflow_run_id": mlflow["nodes"].get(node_id),
                "metrics": node.metrics,
            }
            for node_id, node in state.nodes.items()
        ]
        whole = {
            "run": state.run,
            "pipeline": state.pipeline,
            "status": state.status,
            "mlflow_run_id": mlflow["parent"],
        }
        print_lines(json.dumps({**whole, "nodes": nodes}, indent=1))
        return OK
    print_results(state, record.graph().result_nodes)
    print_lines(f"run {state.run}: {state.status}")
    return OK


def ops(options: argparse.Namespace) -> int:
    files = [Path(file).absolute() for file in options.ops]
    specs = [load_op(options.name, files)] if options.name else list(all_ops(files).values())
    if options.json:
        print_lines(json.dumps({"ops": [_op_row(spec) for spec in specs]}, indent=1))
    elif options.name:
        print_lines(_op_text(specs[0]))
    else:
        width = max(len(spec.name) for spec in specs)
        for spec in specs:
            print_lines(f"{spec.name:{width}}  {spec.help.splitlines()[0] if spec.help else ''}")
    return OK


def sync(options: argparse.Namespace) -> int:
    store = Store.open(store_path(options.store, None), write=True)
    record = find_record(store.records, options.run)
    record.lock()
    warning = send_in_foreground(store.path, record.folder)
    if warning is not None:
        print_lines(f"dflow: {warning}", error=True)
        return FAILED
    print_lines(f"run {record.run}: MLflow holds all of it (run {mlflow_ids(store.records, record)['parent']})")
    return OK


def ui(options: argparse.Namespace) -> NoReturn:
    """Becomes the MLflow UI on this store's database."""
    store = Store.open(store_path(options.store, None), write=False).path
    if not (store / "mlflow.db").exists():
        raise StoreError(f"{store} holds no mlflow.db: nothing was tracked there yet")
    require_free_port(options.host, options.port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{store / 'mlflow.db'}"]
    command += ["--artifacts-destination", (store / "mlartifacts").as_uri()]
    command += ["--host", options.host, "--port", str(options.port), "--workers", "1"]
    print_lines(f"http://{options.host}:{options.port}")
    os.execve(sys.executable, command, {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})


def serve(options: argparse.Namespace) -> NoReturn:
    """Becomes executor.serve, which needs ops; this command loads them only after it checked whose they are."""
    names = ("run", "node", "host", "port", "check", "extra")
    store = str(store_path(options.store, None))
    asked = json.dumps({"store": store, **{name: getattr(options, name) for name in names}})
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # no `ops` of the working directory's
    os.execve(sys.executable, [sys.executable, "-m", "executor.serve", asked], environment)


def _run(session: Session, *, adopt: bool = False) -> int:
    record = session.record
    code = run_session(session, make_display(record.state), adopt=adopt)
    print_results(record.state, session.graph.result_nodes)
    if code == OK:
        parent = mlflow_ids(session.store.records, record)["parent"]
        where = f"; results in MLflow run {parent}" if parent else ""
        print_lines(f"run {record.run} is done{where}")
    elif code == FAILED:
        print_lines(
            f"run {record.run} failed; after a fix of code or data: dflow resume {record.run}; "
            "after a change of the pipeline file: dflow run FILE",
            error=True,
        )
    else:
        print_lines(f"run {record.run} was stopped; go on with: dflow resume {record.run}", error=True)
    return code


def _plan_rows(graph: Graph, decisions: Mapping[str, Decision]) -> list[dict[str, Any]]:
    return [
        {
            "id": node_id,
            "op": graph.nodes[node_id].op.name,
            "key": decision.key,
            "digest": decision.digest,
            "state": "done" if decision.cache == "hit" else "pending",
            "cache": decision.cache,
            "reason": decision.reason,
            "seconds": None,
            "mlflow_run_id": None,
        }
        for node_id, decision in decisions.items()
    ]


def _op_row(spec: OpSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "help": spec.help,
        "version": spec.version,
        "run": spec.run,
        "resumable": spec.resumable,
        "single_process": spec.single_process,
        "sequence_parallel": spec.sequence_parallel,
        "inputs": [
            {"name": edge.name, "type": edge.type.__name__, "optional": edge.optional, "many": edge.many}
            for edge in spec.edges.values()
        ],
        "output": spec.output.__name__,
        "fields": [
            {
                "name": field.name,
                "type": type_name(field.type),
                "required": field.required,
                "default": None if field.default is NOTHING else field.default,
                "neutral": field.neutral,
                "help": field.help,
            }
            for field in spec.fields.values()
        ],
    }


def _op_text(spec: OpSpec) -> str:
    lines = [f"{spec.name} (version {spec.version})", f"  {spec.help}", "", "inputs"]
    for edge in spec.edges.values():
        kind = f"list of {edge.type.__name__}" if edge.many else edge.type.__name__
        lines.append(f"  {edge.name}: {kind}{' (optional)' if edge.optional else ''}")
    lines += ["output", f"  {spec.output.__name__}", "launch", f"  {_launches(spec)}", "config"]
    for field in spec.fields.values():
        default = "required" if field.required else f"default {json.dumps(field.default)}"
        neutral = ", outside the key" if field.neutral else ""
        lines.append(f"  {field.name}: {type_name(field.type)} ({default}{neutral})")
        lines.append(f"      {field.help}")
    return "\n".join(lines)


def _launches(spec: OpSpec) -> str:
    if spec.single_process:
        return "one process"
    if spec.sequence_parallel:
        return "one process, or torchrun with nproc ranks, of which sp_degree share every sequence"
    return "one process, or torchrun with nproc ranks"


def _for_sglang(arguments: list[str]) -> tuple[list[str], list[str]]:
    """dflow's own arguments, and those behind "--" of `dflow serve`, which are SGLang's."""
    end = arguments.index("--") if arguments[:1] == ["serve"] and "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _check_not_shadowed() -> None:
    """Raises DflowError where another package called `ops` comes before dflow's own."""
    found = importlib.util.find_spec("ops")
    origin = found.origin if found is not None else None
    if origin is None or Path(origin).resolve() != PROJECT / "ops" / "__init__.py":
        raise DflowError(
            f'the package "ops" that Python finds is {origin}, not that of dflow in {PROJECT}; '
            "rename it, or leave the folder that holds it"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflow", description="Pipelines that train DFlash drafts: cached, resumable, tracked."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(function.__name__.replace("_", "-"), help=help, description=help)
        added.set_defaults(command=function)
        return added

    def pipeline_command(function: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = command(function, help)
        added.add_argument("file", type=Path, metavar="FILE", help="a pipeline: *.toml, or *.py with pipeline()")
        return added

    with_set = [
        pipeline_command(run, "run what is stale in a pipeline"),
        pipeline_command(plan, "show what would run, and why"),
        pipeline_command(explain, "say why a node would run"),
        command(resume, "go on with a run, or run a part of it anew"),
        pipeline_command(compare_backends, "capture a few samples with transformers and with SGLang, and compare"),
    ]
    for added in with_set:
        added.add_argument(
            "-s", dest="set", action="append", default=[], metavar="NODE.FIELD=VALUE", help="change a value"
        )
    with_set[2].add_argument("node", metavar="NODE")
    with_set[3].add_argument(
        "--from", dest="start", metavar="NODE", help="run it and all below anew, take the rest as it is"
    )
    with_set[3].add_argument("--adopt", action="store_true", help="take over unfinished work that older code began")
    with_set[4].add_argument("--node", metavar="NODE", help="the capture node; all of them unless given")
    with_set[4].add_argument("--samples", type=int, default=8, metavar="N", help="how many; 8 unless given")
    shown = command(status, "show a run")
    synced = command(sync, "send to MLflow what it lacks of a run")
    served = command(serve, "serve a run's target with its draft in SGLang, and ask it one prompt")
    for added in (with_set[3], shown, synced, served):
        added.add_argument("run", nargs="?", metavar="RUN", help="a run's id or a part of it; the latest unless given")
    listed = command(ops, "list the ops, or describe one")
    listed.add_argument("name", nargs="?", metavar="NAME")
    listed.add_argument("--ops", action="append", default=[], metavar="FILE", help="a file with ops of your own")
    shown_ui = command(ui, "serve the MLflow UI on the store")
    served.usage = "dflow serve [RUN] [--check] [--node NODE] [--host HOST] [--port PORT] [-- ARGUMENTS OF SGLANG]"
    served.add_argument("--check", action="store_true", help="stop when the prompt is answered; exit code 1 otherwise")
    served.add_argument("--node", metavar="NODE", help="the node that exports the draft, where a run exports several")
    for added, port in ((shown_ui, 5000), (served, 30000)):
        added.add_argument("--host", default="127.0.0.1")
        added.add_argument("--port", type=int, default=port)
    for added in (with_set[1], with_set[4], shown, listed):
        added.add_argument("--json", action="store_true", help="machine-readable output")
    for added in (*with_set, shown, synced, shown_ui, served):
        added.add_argument("--store", metavar="DIR", help="the store; DFLOW_STORE or runs/ in the project unless given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
