"""`dflow plan`: show what would run and why: of all nodes, with what they need, of one up to the
first cause above it, or as a graph.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from dsl.check import Absent
from dsl.errors import DflowError, PipelineError, shortened
from dsl.files import free_bytes
from dsl.finding import Finding
from dsl.graph import Graph
from dsl.launch import memory_bytes
from dsl.read_toml import read_graph, tree_with_ops
from dsl.shown import shown_bytes
from dsl.tune import TUNE
from executor.commands.arguments import (
    add_file,
    add_json,
    add_overrides,
    add_ray,
    add_selection,
    add_store,
    count,
    open_store,
)
from executor.cost.constants import CPU, DEFAULT_GPU, GPU_NAMES, GPUS, Machines
from executor.launchers.cluster_address import use_cluster
from executor.planning.history import PreviousNodes
from executor.planning.planner import WORDS, Decision, Planner, cached_artifacts, earlier_rule_note
from executor.planning.session import make_planner, missing_data, refusals, require_node, require_others, selected
from executor.store.artifact_store import Store
from executor.system.output import OK, USAGE, columns, print_json, print_lines, shown_digest, write_on

if TYPE_CHECKING:
    from dsl.estimate import Estimate
    from executor.cost.model import Cost
    from executor.planning.preflight import Estimates
    from executor.records.run_record import NodeState
    from executor.tune.trials import Trials


PICTURES = (".png", ".svg", ".pdf")
COLOURS = {WORDS["hit"]: "32", WORDS["miss"]: "33", WORDS["maybe"]: "36"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    add_selection(parser)
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--why", metavar="NODE", help="why this node would run, or where its artifact came from")
    view.add_argument("--graph", action="store_true", help="draw the nodes, and what reads from what")
    view.add_argument("--dot", action="store_true", help="the graph in Graphviz's format")
    view.add_argument(
        "--picture", type=Path, metavar="FILE", help=f"write a picture of the graph: {', '.join(PICTURES)}"
    )
    cost = parser.add_argument_group("what trainings cost on other machines, stored and streamed (docs/cluster.md)")
    cost.add_argument("--gpus", type=partial(count, least=1), metavar="N", help="on so many GPUs")
    cost.add_argument(
        "--gpu",
        choices=GPU_NAMES,
        help=f"their kind; cpu: processes on a CPU, by measured rates only; default: {DEFAULT_GPU}",
    )
    cost.add_argument("--disk", type=_gigabytes, metavar="GB/S", help="the rate of the store's disk for all hosts")
    cost.add_argument("--wire", type=_gigabytes, metavar="GB/S", help="the rate of the network of each host")
    add_json(parser)
    add_store(parser)
    add_ray(parser)


def _gigabytes(text: str) -> float:
    """A type of argparse: a number above 0 of gigabytes, as bytes."""
    try:
        size = float(text) * 1e9
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {shortened(text)}")
    return size


def main(options: argparse.Namespace) -> int:
    """Run `dflow plan`. Exit code 2 where a node that would run lacks something on this machine.

    With a drawing requested, what would run is drawn in any case.
    """
    use_cluster(options.ray)
    if options.picture is not None and options.picture.suffix.lower() not in PICTURES:
        raise DflowError(f"{options.picture}: the name of a picture must end in {', '.join(PICTURES)}")
    if options.gpus is None and (options.gpu, options.disk, options.wire) != (None, None, None):
        raise DflowError("--gpu, --disk and --wire describe the machines of --gpus N: give it too")
    absent: Absent = {}
    try:
        whole = read_graph(options.file, options.set, options.sweep, absent)
    except PipelineError as error:
        raise PipelineError([*dict.fromkeys([*_of_trials(options), *error.mistakes])]) from error
    graph, only = selected(whole, options.to, options.only)
    if options.why is not None:
        require_node(graph, options.why)
    store = open_store(options)
    planner = make_planner(store, graph, absent=absent)
    decisions = planner.plan()
    if options.why is not None:
        return _explain(store, planner, options, missing_data(decisions, absent))
    if options.graph or options.dot or options.picture is not None:
        return _draw(graph, {node_id: WORDS[decision.cache] for node_id, decision in decisions.items()}, options)
    require_others(decisions, only)
    free_disk = free_bytes(store.path)
    lacking, estimates = refusals(store, graph, decisions, absent, free_disk)
    missing = list(dict.fromkeys(map(str, lacking)))
    found = {} if options.gpus is None else _costs(store, graph, decisions, estimates, options)
    decisions = {node_id: each for node_id, each in decisions.items() if not only or node_id in only}
    needs: dict[str, Estimate] = {}
    measured: dict[str, int | None] = {}
    does_not_fit: list[str] = []
    history = PreviousNodes(store, graph.name)
    if estimates is not None and any(decision.cache != "hit" for decision in decisions.values()):
        needs = {node_id: need for node_id, need in estimates.needs.items() if node_id not in absent}
        measured, does_not_fit = _memory(graph, needs, history)
    cluster = _cluster_lines(graph)
    search = _search(store, graph, options)
    if options.json:
        from executor.planning.preflight import estimate_row

        sizes = {node_id: estimate_row(need, measured.get(node_id)) for node_id, need in needs.items()}
        rows = plan_rows(graph, decisions, history.computed)
        plan = {"pipeline": graph.name, "nodes": rows, "resources": sizes, "free_disk": free_disk}
        plan |= {"missing_here": missing, "does_not_fit": does_not_fit, "cluster": cluster}
        if search is not None:
            plan["tune"] = asdict(search)
        if found:
            plan["cost"] = {node_id: asdict(cost) for node_id, cost in found.items()}
        print_json(plan)
    else:
        print_plan(graph, decisions, earlier_rule_note(decisions, str(options.file)))
        print_estimates(graph, needs, measured, free_disk, store.path)
        _print_costs(found, free_disk, store.path)
        if missing:  # last, where nobody overlooks it
            print_lines("\n".join(["", "missing or wrong, so `dflow run` would refuse to start:", *missing]))
        for line in [*does_not_fit, *cluster]:
            print_lines(line)
        if search is not None and search.announcement:
            print_lines(f"\n`dflow tune {shlex.quote(str(options.file))}`: {search.announcement}")
        if search is not None and search.refused:
            print_lines("\n".join(["", "missing or wrong, so `dflow tune` would refuse to start:", *search.refused]))
    return USAGE if missing or (search is not None and search.refused) else OK


@frozen
class _Search:
    """What `dflow tune` would do with the file, or refuse. trials, steps, seconds: at most; None if not known."""

    refused: Sequence[str]
    trials: int | None = None
    rungs: Sequence[int] = ()
    steps: int | None = None
    seconds: float | None = None
    announcement: str = ""


def _trials(options: argparse.Namespace) -> Trials | None:
    """The trials of the whole file as it stands; None without a table [tune], in the file of a winner, which has the
    table of the one that it extends, and where the arguments change or select something, which `dflow tune` does not
    take. Raises PipelineError with all mistakes of the file.
    """
    from executor.tune.trials import trials_of
    from executor.tune.winner import is_winners

    if options.file.suffix != ".toml" or options.set or options.sweep or options.to or options.only:
        return None
    tree = tree_with_ops(options.file)
    return trials_of(tree) if TUNE in tree.values and not is_winners(options.file) else None


def _of_trials(options: argparse.Namespace) -> Sequence[Finding]:
    """The mistakes of a file with a table [tune]; empty for others."""
    try:
        _trials(options)
    except PipelineError as error:
        return error.mistakes
    return []


def _search(store: Store, graph: Graph, options: argparse.Namespace) -> _Search | None:
    """The search of a file; None where it has none (`_trials`)."""
    if graph.tree is None or TUNE not in graph.tree.values:  # the usual case: no more is loaded
        return None
    from executor.tune.preflight import announcement, pace_of, search_preflight

    try:
        trials = _trials(options)
    except PipelineError as error:
        return _Search([str(each) for each in error.mistakes])
    if trials is None:
        return None
    pace = pace_of(store, trials)
    found = search_preflight(store, trials)
    text = announcement(trials, pace)
    if found.uncounted:
        text += f"\nthe rungs are compared with the steps of the training once there is {', '.join(found.uncounted)}"
    return _Search(
        [str(each) for each in found.refused],
        trials.count,
        trials.rules.rungs,
        trials.planned_steps,
        None if pace is None else pace.seconds(trials),
        text,
    )


def _costs(
    store: Store,
    graph: Graph,
    decisions: Mapping[str, Decision],
    estimates: Estimates | None,
    options: argparse.Namespace,
) -> dict[str, Cost]:
    """The cost of each training on the machines that the options describe. Raises DflowError where it is unknown."""
    from executor.cost.costs import costs  # with the hooks of ops
    from executor.cost.rates import measured
    from executor.planning.preflight import graph_estimates

    known = estimates or graph_estimates(graph, cached_artifacts(store, decisions), free_bytes(store.path))
    machines = Machines(gpu=CPU if options.gpu == CPU.name else GPUS[options.gpu or DEFAULT_GPU])
    rates = {name: rate for name in ("disk", "wire") if (rate := getattr(options, name)) is not None}
    return costs(graph, known.needs, evolve(machines, **rates), options.gpus, measured(store, graph.name, machines.gpu))


def _print_costs(found: Mapping[str, Cost], free_disk: int, store: Path) -> None:
    from executor.cost.text import cost_text

    for node_id, cost in found.items():
        print_lines(f"\n{cost_text(node_id, cost, free_disk, store)}")


def _memory(
    graph: Graph, needs: Mapping[str, Estimate], history: PreviousNodes
) -> tuple[dict[str, int | None], list[str]]:
    """The peak memory of a rank when each node last ran, and a line for each node that does not fit on this machine."""
    from dsl.memory import machine_memory
    from executor.planning.preflight import measured_memory, too_large
    from executor.system.hardware import gpu_memory

    measured = {
        node_id: measured_memory(graph.nodes[node_id], history.computed(node_id))
        for node_id, need in needs.items()
        if need.memory or need.disk
    }
    return measured, too_large(graph, needs, gpu_memory, memory_bytes(graph.machine) or machine_memory(), measured)


def _cluster_lines(graph: Graph) -> list[str]:
    """A line on each cluster that the graph's nodes use."""
    elsewhere = [node.launch for node in graph.nodes.values() if node.launch.kind == "ray"]
    if not elsewhere:  # the usual case: no module that runs stages is imported
        return []
    from executor.launchers.backends import Backends

    return Backends(graph.machine).describe(elsewhere)


def _explain(store: Store, planner: Planner, options: argparse.Namespace, absent_inputs: list[Finding]) -> int:
    """Print why one node would run or is cached. Raises PipelineError where data that a node must read is missing."""
    from executor.planning.explanation import explain, explanation_text

    if absent_inputs:
        raise PipelineError(absent_inputs)
    explanations = explain(store, planner, options.why)
    if options.json:
        first, *above = [each.to_json() for each in explanations]
        print_json({**first, "above": above})
    else:
        print_lines(explanation_text(explanations))
    return OK


def _draw(graph: Graph, states: Mapping[str, str], options: argparse.Namespace) -> int:
    """Print the graph, or write it as a picture. states: a word for each node."""
    from executor.report.graph_text import dot, drawn_graph, levels

    if options.picture is not None:
        from executor.report.pictures import save_graph  # loads matplotlib

        save_graph(graph, states, options.picture)
    if options.json:
        level = levels({node.id: node.parents for node in graph.nodes.values()})
        nodes = [
            {
                "id": node.id,
                "op": node.op.name,
                "level": level[node.id],
                "state": states[node.id],
                "inputs": {edge: list(ids) for edge, ids in node.inputs.items()},
            }
            for node in graph.nodes.values()
        ]
        print_json({"pipeline": graph.name, "nodes": nodes})
    elif options.dot:
        print_lines(dot(graph, states))
    elif options.picture is None:
        write_on(sys.stdout, f"{_coloured(drawn_graph(graph, states))}\n")
    return OK


def _coloured(text: str) -> str:
    """The text with states coloured, if on a terminal. States are columns between blanks."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    state = re.compile(rf"(?<=  )(?:{'|'.join(COLOURS)})(?=  |$)", re.MULTILINE)
    return state.sub(lambda found: f"\x1b[{COLOURS[found[0]]}m{found[0]}\x1b[0m", text)


def print_plan(graph: Graph, decisions: Mapping[str, Decision], note: str) -> None:
    """Print a table of what is cached, what runs and why, what may stay cached; then a note. It has a column of digests
    where the store has an artifact of a node.
    """
    has_digests = any(each.digest for each in decisions.values())
    digests = {node_id: [shown_digest(each.digest) or "-"] * has_digests for node_id, each in decisions.items()}
    rows = [
        (node_id, graph.nodes[node_id].op.name, WORDS[each.cache], *digests[node_id], each.reason)
        for node_id, each in decisions.items()
    ]
    print_lines(columns(("node", "op", "plan", *["digest"] * has_digests, "why"), rows))
    if any(decision.cache == "maybe" for decision in decisions.values()):
        print_lines(f"\n{WORDS['maybe']}: runs unless its inputs come out the same")
    if note:
        print_lines(f"\n{note}")


def print_estimates(
    graph: Graph,
    needs: Mapping[str, Estimate],
    measured: Mapping[str, int | None],
    free_disk: int,
    store: Path,
) -> None:
    """Print the memory of a rank, its peak in the last run, and the disk space of each node, then details and notes.

    Prints nothing if no op gives an estimate.
    """
    rows = []
    details = []
    for node_id, need in needs.items():
        if need.memory or need.disk:
            took = measured.get(node_id)
            last = "" if took is None else shown_bytes(took)
            ranks = str(graph.nodes[node_id].launch.world_size)
            rows.append((node_id, ranks, _total(need.memory), _total(need.per_pass), last, _disk(need)))
        for kind, parts in (("memory", need.memory), ("a pass", need.per_pass), ("disk", need.disk)):
            if len(parts) > 1:
                details.append(f"{node_id}: {kind}: {_parts(parts)}")
        details += [f"{node_id}: {note}" for note in need.notes]
    if rows:
        header = ("node", "ranks", "held each", "a pass", "took last", "disk")
        print_lines("\n" + columns(header, rows, right=header[1:]))
        print_lines(
            "held each: weights, gradients and optimizer state of a rank, on its GPU or else in memory; a pass: what "
            "the longest sample needs besides, at most, without libraries; took last: its peak when the node ran last; "
            "--smoke measures it before a full run"
        )
        print_lines(f"{shown_bytes(free_disk)} of disk are free at {store}")
    for line in details:
        print_lines(line)


def plan_rows(
    graph: Graph, decisions: Mapping[str, Decision], computed: Callable[[str], NodeState | None]
) -> list[dict[str, Any]]:
    """The rows of `dflow plan --json`. computed: a node as it was computed last."""
    return [
        {
            "id": node_id,
            "op": graph.nodes[node_id].op.name,
            "key": decision.key,
            "digest": decision.digest,
            "state": "done" if decision.cache == "hit" else "pending",
            "cache": decision.cache,
            "reason": decision.reason,
            "seconds": None if (last := computed(node_id)) is None else last.seconds,
            "mlflow_run_id": None,
        }
        for node_id, decision in decisions.items()
    ]


def _total(parts: Mapping[str, int]) -> str:
    return shown_bytes(sum(parts.values())) if parts else ""


def _disk(need: Estimate) -> str:
    return _total(need.disk) + (f" for {need.disk_per}" if need.disk_per else "")


def _parts(parts: Mapping[str, int]) -> str:
    """The parts of an estimate as text, the largest first."""
    ordered = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{name} {shown_bytes(size)}" for size, name in ordered)
