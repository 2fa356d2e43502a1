"""What commands measure on artifacts, each in a process of its own: `dflow diagnose` and `dflow doctor --backends`.

This process must not load torch; the other one has a stage's environment, and ends with this one. What they exchange
has no names in the file system, so no files remain however it ends.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError, DflowError, PipelineError, StoreError, did_you_mean
from dsl.estimate import useful_threads
from dsl.files import read_object_or_none, write_json
from dsl.finding import Finding
from dsl.graph import Graph, graph_to_json
from dsl.stage import NOW
from executor.launchers.host_run import stage_environment
from executor.planning.code_trust import refuse_untrusted_code, trusting_nodes
from executor.planning.session import make_planner
from executor.records.events import NodeEvents, read_events
from executor.records.run_record import Record, load_begun
from executor.store.artifact_store import Store
from executor.system.resource_pool import threads_of
from executor.system.supervisor import ChildGroup, exit_text, module_command
from ops.tools.diagnose.chain import Chain, drafts_of, last_drafts_of, training_of
from ops.tools.diagnose.judgement import TABLES, PartFigures

LOG_LINES = 20

Result = Mapping[str, Any]
Artifacts = Mapping[str, tuple[Path, str]]  # node -> folder and digest of its artifact
DIAGNOSIS = "ops.tools.diagnose.run"
RESULT = "diagnosis.json"
CAPTURE = "capture_targets"
COMPARISON = "ops.tools.compare_backends.run"


def computed(
    what: str,
    module: str,
    graph: Graph,
    node_id: str,
    artifacts: Artifacts,
    show: Callable[[str], None] = lambda text: None,
    **values: Any,
) -> Result:
    """Run `python -m module REQUEST RESULT` for a node, and return the JSON that it wrote.

    what: its name in errors. show: called with each step. values: further values of the request, in JSON. Raises
    DataError where the module refused the request, and DflowError where it failed.
    """
    places = {name: [str(path), digest] for name, (path, digest) in artifacts.items()}
    request = {"graph": graph_to_json(graph), "node": node_id, "artifacts": places, **values}
    node = graph.nodes[node_id]
    useful = useful_threads(node, {name: path for name, (path, _) in artifacts.items()})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as question, tempfile.TemporaryFile() as answer:
        json.dump(request, question)
        question.flush()
        files = (question.fileno(), answer.fileno())
        threads = threads_of(node.launch, useful=useful)
        code, tail = _run(module, files, threads, lambda text: show(f"{node_id}: {text}"))
        if code:
            raise DflowError("\n  ".join([f"{node_id}: the {what} {exit_text(code)}:", *tail]))
        result: Result = json.load(answer)
    if "error" in result:
        raise DataError(f"{node_id}: {result['error']}")
    return result


def _run(module: str, files: Sequence[int], threads: int, show: Callable[[str], None]) -> tuple[int, Sequence[str]]:
    """Run a module in a process; returns its exit code and its last lines that name no steps.

    files: descriptors of the request and the result.
    """
    command = module_command(module, *(f"/proc/self/fd/{file}" for file in files))
    tail: deque[str] = deque(maxlen=LOG_LINES)
    with ChildGroup(command, stage_environment(threads), output=subprocess.PIPE, files=files, grace_s=0) as group:
        for line in group.lines():
            if line.startswith(NOW):
                show(line.removeprefix(NOW).strip())
            else:
                tail.append(line.rstrip())
        group.ended_within(None)
    return group.close(), tail


def diagnose(
    store: Store,
    record: Record,
    node_id: str | None,
    prompts: int,
    show: Callable[[str], None],
    split: str | None,
    budget: float,
) -> Iterator[Result]:
    """Diagnose each draft of a run, or the draft of one node, with ops/tools/diagnose/run.py.

    show: called with each step. split: the only one to use prompts of, see Chain.of. budget: seconds for each draft,
    into which the number of prompts is made to fit. Raises PipelineError where there is no such node, StoreError where
    its draft is not in the store, or an artifact has code that no config trusts, and DataError where it cannot be
    measured.
    """
    graph = record.graph()
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
        raise StoreError(f"run {record.run}: the store holds no draft of {' and '.join(missing)}; {record.to_finish()}")
    for name in nodes:
        Chain.of(graph, artifacts, name, run=record.run)  # refused here, not seconds later in the process
    for name in nodes:
        loss = loss_curve(store, record, training_of(graph, name))
        again = f"dflow resume {record.run} --from {name}"
        values = {"prompts": prompts, "split": split, "loss": loss, "again": again}
        clock = {"budget": budget, "begun": time.monotonic()}  # that of all processes of this machine
        yield computed("diagnosis", DIAGNOSIS, graph, name, artifacts, show, **values, **clock)


def keep(record: Record, result: Result) -> None:
    """Store a diagnosis in the run's record, as {"drafts": [...]}; it replaces an earlier one of the same node."""
    known = (read_object_or_none(record.folder / RESULT) or {}).get("drafts", [])
    digest = record.state.nodes[result["node"]].digest
    by_node = {each["node"]: each for each in (*known, {**result, "digest": digest})}
    write_json(record.folder / RESULT, {"drafts": list(by_node.values())})


@frozen
class Kept:
    """What a record keeps of a diagnosis. parts: tables of tau by part; empty of an earlier version."""

    findings: Sequence[Finding]
    parts: Mapping[str, Sequence[PartFigures]]


def kept(record: Record) -> dict[str, Kept]:
    """The results of `dflow diagnose` kept in a record, by node, for drafts that the run still has.

    Empty where the file is damaged.
    """
    found = {}
    try:
        for each in (read_object_or_none(record.folder / RESULT) or {}).get("drafts", []):
            state = record.state.nodes.get(each["node"])
            if state is not None and state.digest == each["digest"]:
                tables = {table: each.get("parts", {}).get(table, ()) for table in TABLES}
                parts = {table: [PartFigures(**part) for part in of_table] for table, of_table in tables.items()}
                found[each["node"]] = Kept(list(map(Finding.from_json, each["findings"])), parts)
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
    """The training loss of a node as [step, loss], from the run that made its artifact; empty where that is gone."""
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


def compare(store: Store, graph: Graph, node_id: str | None, samples: int) -> list[Result]:
    """Compare the backends of each capture node of a graph, or of the named one, on a few of its samples.

    Raises PipelineError for an unknown node, DataError where the supported SGLang is not installed, and StoreError
    where the store lacks the tokens or the target.
    """
    if samples < 1:
        raise PipelineError([Finding(f"--samples {samples}: must be 1 or more")])
    from ops.lib.sglang.version import require_sglang  # here: the command checks first whose `ops` this is

    require_sglang("doctor --backends")
    nodes = _capture_nodes(graph, node_id)
    decisions = make_planner(store, graph).plan()
    made = {name: decision.digest for name, decision in decisions.items() if decision.cache == "hit"}
    for name in nodes:
        missing = [parent for parent in graph.nodes[name].parents if parent not in made]
        if missing:
            raise StoreError(
                f"{name} reads from {' and '.join(missing)}, which {store.path} does not hold for this pipeline: "
                f"`dflow run` with the same file and -s computes them; stop it (Ctrl-C) when {name} has started"
            )
    artifacts = {name: (store.object_path(digest), digest) for name, digest in made.items() if digest is not None}
    return [computed("comparison", COMPARISON, graph, name, artifacts, samples=samples) for name in nodes]


def _capture_nodes(graph: Graph, node_id: str | None) -> list[str]:
    captures = [name for name, node in graph.nodes.items() if node.op.name == CAPTURE]
    if node_id is None and captures:
        return captures
    if node_id in captures:
        return [node_id] if node_id is not None else []
    if node_id is None:
        raise PipelineError([Finding(f"{graph.name} has no {CAPTURE} node, so there is nothing to compare")])
    hint = did_you_mean(node_id, captures) or f"{CAPTURE} nodes: {', '.join(captures) or 'none'}"
    raise PipelineError([Finding(f'"{node_id}" is not a {CAPTURE} node', advice=hint)])
