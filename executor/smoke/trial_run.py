"""`dflow run FILE --smoke N`: the chain on N samples in a store of its own, then an estimate of the full run.

The small run is a run like any other, in <store>/smoke: what has not changed since the last one is not run again, and
`dflow resume --store <store>/smoke` continues it. The full run, in its own store, uses nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.errors import PipelineError
from dsl.estimate import Amount, Estimate, Growth, Trial
from dsl.files import free_bytes
from dsl.finding import Finding
from dsl.graph import Graph, GraphNode
from dsl.op_class import hook
from dsl.op_table import user_ops
from dsl.shown import toml_text
from executor.planning.planner import cached_artifacts
from executor.planning.preflight import graph_estimates
from executor.planning.session import Session, make_planner, new_run
from executor.records.events import read_events
from executor.records.run_record import NodeState, Record
from executor.results.run_table import print_results
from executor.scheduler.plain_display import make_display
from executor.scheduler.run_loop import run_session
from executor.smoke.full_run import NodeEstimate, Report, full_time, print_estimates, reports, series_of
from executor.store.artifact_store import SMOKE, Store, store_path
from executor.system.output import FAILED, OK, name_store, print_lines
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.lib.data.sample_account import source_splits, summary_splits

FEWEST = 3  # one sample for each of train, val and test


@frozen
class Measured:
    """A node of the trial: its state, progress reports, artifact and device, from the run that computed it."""

    state: NodeState
    reports: list[Report]
    artifact: Path
    size: int
    device: str


def smoke_run(path: Path, graph: Graph, samples: int, file: str) -> int:
    """Run a small trial of the graph. Returns 0 for success, 1 if a node failed or would fail in the full
    run, 128 + a signal's number if stopped.

    file: the absolute path of the pipeline file. Raises PipelineError for too few samples.
    """
    if samples < FEWEST:
        hint = f"take {FEWEST} at least, one for each of train, val and test; 16 is a good number"
        raise PipelineError([Finding(f"--smoke {samples}: too few samples", advice=hint)])
    store = Store.open(path, write=True)
    name_store(path / SMOKE, store_path(None, None))
    session = new_run(Store.open(path / SMOKE, write=True), small_graph(graph, samples), given=graph, file=file)
    unreduced = _without_smoke(session)
    if unreduced:
        print_lines(
            f"not reduced, since their ops have no smoke(): {', '.join(unreduced)}; only their inputs are smaller"
        )
    record = session.record
    display = make_display(record.state)
    code = run_session(session, display)
    print_results(record.state, (), warned=display.warned)
    if changed := changed_fields(session.graph, graph):
        print_lines("\n".join(["values that the trial took instead of those of the full run:", *changed]))
    if code == OK:
        succeeds = print_estimates(estimates(store, graph, session), samples, free_bytes(path), path)
        return OK if succeeds else FAILED
    if code == FAILED:
        print_lines(_failure_text(session, samples), error=True)
    else:
        print_lines("the smoke run was stopped; repeat the command to continue", error=True)
    return code


def _failure_text(session: Session, samples: int) -> str:
    """A text on whether too few samples may have made a node fail, and what to do."""
    nodes = session.record.state.nodes
    artifacts = {
        node_id: session.store.object_path(state.digest) for node_id, state in nodes.items() if state.digest is not None
    }
    failed = next(node_id for node_id, state in nodes.items() if state.state == "failed")
    emptied = emptied_splits(session.graph, artifacts, failed)
    if emptied:
        return (
            f"the smoke run on {samples} samples failed, perhaps only because they are few: "
            f"{'; '.join(map(str, emptied))}; repeat it with more samples: --smoke {4 * samples}"
        )
    return (
        f"the smoke run on {samples} samples failed; fix the cause and repeat the command. A node without samples may "
        f"need more of them: --smoke {4 * samples}"
    )


def _without_smoke(session: Session) -> list[str]:
    """The nodes of user ops without a smoke hook, which run with the values of the full run."""
    own = user_ops(session.graph.op_files)
    return [
        node_id
        for node_id, node in session.graph.nodes.items()
        if node.op.name in own and hook(node.op, "smoke") is None and session.decisions[node_id].cache != "hit"
    ]


def small_graph(graph: Graph, samples: int) -> Graph:
    """The graph reduced to a few samples, as its ops say; tracked only in its own store."""
    nodes = {node_id: attrs.evolve(node, config=_small(node, samples)) for node_id, node in graph.nodes.items()}
    return attrs.evolve(graph, nodes=nodes, tracking_uri=None)


def changed_fields(small: Graph, graph: Graph) -> list[str]:
    """A line for each node with fields that the trial changes: their values, and those of the full run."""
    lines: dict[str, list[str]] = {}
    for node_id, node in graph.nodes.items():
        tried = small.nodes[node_id].config
        pairs = {name: (getattr(tried, name), getattr(node.config, name)) for name in node.op.fields}
        changed = [
            f"{name} = {toml_text(new)} (full run: {toml_text(old)})"
            for name, (new, old) in pairs.items()
            if new != old
        ]
        if changed:
            lines.setdefault(", ".join(changed), []).append(node_id)
    return [f"  {', '.join(nodes)}: {changed}" for changed, nodes in lines.items()]


def _small(node: GraphNode, samples: int) -> Any:
    smoke: Callable[[Any, int], Mapping[str, Any]] | None = hook(node.op, "smoke")
    return node.config if smoke is None else attrs.evolve(node.config, **smoke(node.config, samples))


def estimates(store: Store, graph: Graph, session: Session) -> dict[str, NodeEstimate]:
    """Predict the needs of each node in the full run, in the order of the data. session: the finished trial run."""
    made = cached_artifacts(store, make_planner(store, graph).plan())
    measured = {node_id: _measured(session, node_id) for node_id in graph.nodes}
    artifacts = {node_id: one.artifact for node_id, one in measured.items()}
    trials = {
        node_id: Trial(config=node.config, artifact=artifacts[node_id], inputs=node.by_edge(artifacts))
        for node_id, node in session.graph.nodes.items()
    }
    needs = graph_estimates(graph, made, free_bytes(store.path), trials).needs
    growths: dict[str, Growth] = {}
    found = {}
    for node_id, node in graph.nodes.items():
        need = needs.get(node_id, Estimate())
        growths[node_id] = need.growth or _growth_of_inputs(node, measured[node_id], growths)
        if node_id in made:
            found[node_id] = NodeEstimate(cached=True)
        else:
            found[node_id] = _estimate(node, measured[node_id], need, growths[node_id])
    return found


def _measured(session: Session, node_id: str) -> Measured:
    """The measurements of a trial's node; for a cached node those of the run that computed it."""
    store, record = session.store, session.record
    state = record.state.nodes[node_id]
    name, digest = node_id, state.digest
    assert digest is not None
    folder = store.records / (state.source_run or "-")
    if state.cache == "hit" and folder.is_dir():
        record = Record.load(folder)
        nodes = record.state.nodes
        name = next((name for name, node in nodes.items() if node.key == state.key), node_id)
        state = nodes.get(name, state)
    manifest = store.manifest(digest)
    return Measured(
        state,
        reports(read_events(record.events_path), name, state.attempt),
        store.object_path(digest),
        0 if manifest is None else manifest.size,
        "cpu" if manifest is None else manifest.launch.get("device", "cpu"),
    )


def _growth_of_inputs(node: GraphNode, measured: Measured, growths: Mapping[str, Growth]) -> Growth:
    """The growth of a node whose op gives none: all work is assumed to grow like its largest input."""
    growth = max([1.0, *(growths[parent].output for parent in node.parents)])
    notes = (f"its op does not declare what grows: all of it is scaled, {growth:,.3g} times",) if growth > 1 else ()
    series = (Amount(1, growth),) * max(1, len(series_of(measured.reports)))
    return Growth(series=series, output=growth, notes=notes)


def _estimate(node: GraphNode, measured: Measured, need: Estimate, growth: Growth) -> NodeEstimate:
    state = measured.state
    started, seconds = state.started or 0.0, state.seconds or 0.0
    is_counted = growth.output > 1 and need.growth is not None  # which is better than what a plan expects
    estimated = 0 if is_counted or need.disk_per else sum(need.disk.values())
    return NodeEstimate(
        cached=False,
        tried=seconds,
        time=full_time(started, started + seconds, measured.reports, growth),
        disk=max(measured.size * growth.output, estimated),
        memory=state.memory,
        gpu_memory=state.gpu_memory,
        needed=sum(need.memory.values()),
        ranks=node.launch.world_size,
        device=measured.device,
        notes=growth.notes,
        fails=growth.fails,
    )


@frozen
class EmptiedSplit:
    """A split that a node left empty. entered: samples of the split that reached the node.

    full: those of the whole data, None where not counted.
    """

    node: str
    split: str
    entered: int
    full: int | None

    def __str__(self) -> str:
        of_data = "" if self.full is None else f", of {self.full} in the full data"
        return f'{self.node} left the split "{self.split}" empty ({self.entered} reached it{of_data})'


def emptied_splits(graph: Graph, artifacts: Mapping[str, Path], failed: str) -> list[EmptiedSplit]:
    """The splits that nodes above the failed one left empty. artifacts: of the finished nodes."""
    counting = (Samples, ImageSamples, TokenShards)
    above = set(graph.up_to([failed]).nodes) - {failed}
    kept: dict[str, Mapping[str, int]] = {}
    full: dict[str, Mapping[str, int]] = {}
    found = []
    for node_id, node in graph.nodes.items():
        parents = [parent for parent in node.parents if parent in kept]
        artifact = artifacts.get(node_id) if issubclass(node.op.output, counting) else None
        counted = summary_splits(artifact) if artifact is not None else None
        if artifact is None or counted is None:
            continue
        kept[node_id] = counted
        full[node_id] = source_splits(artifact) or next((full[parent] for parent in parents), {})
        for split, count in counted.items():
            entered = max((kept[parent].get(split, 0) for parent in parents), default=0)
            if node_id in above and entered and not count:
                found.append(EmptiedSplit(node_id, split, entered, full[node_id].get(split)))
    return found
