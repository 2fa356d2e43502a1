"""`dflow diagnose`: the usual causes of a low tau, measured by ops/tools/diagnose/run.py on the artifacts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dsl.errors import PipelineError, StoreError, did_you_mean
from dsl.finding import Finding
from dsl.graph import Graph
from dsl.json_files import read_object, write_json
from executor.model_tools.computation import Result, computed
from executor.planning.code_trust import refuse_untrusted_code, trusting_nodes
from executor.records.events import read_events
from executor.records.metric_points import NodeEvents
from executor.records.run_record import Record, load_begun
from executor.store.artifact_store import Store
from ops.tools.diagnose.chain import Chain, drafts_of, last_drafts_of, training_of

ENTRY = "ops.tools.diagnose.run"
RESULT = "diagnosis.json"


def diagnose(
    store: Store,
    record: Record,
    node_id: str | None,
    prompts: int,
    show: Callable[[str], None],
    split: str | None = None,
) -> Iterator[Result]:
    """The result of ops/tools/diagnose/run.py for each draft of a run, or for that of the named node.

    show: called with each step. split: the only one to use prompts of, see Chain.of. Raises
    PipelineError where there is no such node, StoreError where its draft is not in the store, or an artifact has code
    that no config trusts, and DataError where it cannot be measured.
    """
    graph = record.graph(to_run=True)
    nodes = _chosen(graph, record.run, node_id)
    made = {name: state.digest for name, state in record.state.nodes.items() if state.digest is not None}
    artifacts = {
        name: (store.object_path(digest), digest)
        for name, digest in made.items()
        # A damaged draft is measured too, as its damage is a cause.
        if store.has(digest) or (name in nodes and store.object_path(digest).is_dir())
    }
    trusting = trusting_nodes(graph)
    for name, (_, digest) in artifacts.items():
        refuse_untrusted_code(store, graph.nodes[name], trusting, digest)
    missing = [name for name in nodes if name not in artifacts]
    if missing:
        raise StoreError(
            f"run {record.run}: the store holds no draft of {' and '.join(missing)}; make it: dflow resume {record.run}"
        )
    for name in nodes:
        Chain.of(graph, artifacts, name, run=record.run)  # refused here, not seconds later in the process
    for name in nodes:
        loss = loss_curve(store, record, training_of(graph, name))
        again = f"dflow resume {record.run} --from {name}"
        values = {"prompts": prompts, "split": split, "loss": loss, "again": again}
        yield computed("diagnosis", ENTRY, graph, name, artifacts, show, **values)


def keep(record: Record, result: Result) -> None:
    """Write it to the run's record: {"drafts": [the last result of each with the draft's digest, ...]}."""
    known = (read_object(record.folder / RESULT) or {}).get("drafts", [])
    digest = record.state.nodes[result["node"]].digest
    by_node = {each["node"]: each for each in (*known, {**result, "digest": digest})}
    write_json(record.folder / RESULT, {"drafts": list(by_node.values())})


def kept(record: Record) -> dict[str, list[Finding]]:
    """The findings in a run's record by node, of drafts that the run still has. Empty where the file is damaged."""
    found = {}
    try:
        for each in (read_object(record.folder / RESULT) or {}).get("drafts", []):
            state = record.state.nodes.get(each["node"])
            if state is not None and state.digest == each["digest"]:
                found[each["node"]] = list(map(Finding.from_json, each["findings"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found


def _chosen(graph: Graph, run: str, node_id: str | None) -> list[str]:
    drafts = drafts_of(graph)
    if node_id in drafts:
        return [str(node_id)]
    if node_id is not None:
        hint = did_you_mean(node_id, drafts) or f"nodes that do: {', '.join(drafts) or 'none'}"
        raise PipelineError([Finding(f'"{node_id}" makes no draft in run {run}', advice=hint)])
    if not drafts:
        raise PipelineError([Finding(f"run {run} of {graph.name} makes no draft, so there is nothing to diagnose")])
    return last_drafts_of(graph)


def loss_curve(store: Store, record: Record, node_id: str | None) -> list[tuple[int, float]]:
    """[step, train/loss] of a node, from the run that made its artifact; empty where that is gone."""
    state = None if node_id is None else record.state.nodes.get(node_id)
    if state is None:
        return []
    if state.cache == "hit" and state.source_run is not None:
        maker = load_begun(store.records / state.source_run)
        if maker is None:
            return []
        record, key = maker, store.computed_key(state.source_run, state.key)
        node_id = next((name for name, other in record.state.nodes.items() if other.key == key), node_id)
    events = NodeEvents()
    for event in read_events(record.events_path):
        if event.node == node_id:
            events.add(event)
    return [(point.step, point.metrics["train/loss"]) for point in events.points if "train/loss" in point.metrics]
