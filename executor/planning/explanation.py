"""Why a node runs, up to the first cause above it; or where a cached node's artifact came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import frozen

from dsl.errors import listed
from dsl.graph import GraphNode
from executor.keys.differences import Difference, difference_text, differences, with_paths
from executor.keys.external_inputs import changed_since
from executor.planning.planner import WORDS, Cache, Decision, Planner, Previous
from executor.records.run_record import Record, load_begun
from executor.store.artifact_store import Store
from executor.store.manifest import IndexLine
from executor.system.output import moment, shown_digest
from executor.tracking.sync_state import sent_of

FILES_SHOWN = 200  # characters of their names
InputState = Literal["runs", "may change", "changed", "added", "removed"]


@frozen
class InputChange:
    """An input of a node that changed between two runs.

    old, new: the artifact's digests where known. cause: why the artifact is another one.
    """

    producer: str
    state: InputState
    old: str | None = None
    new: str | None = None
    run: str | None = None
    cause: str = ""


@frozen
class Made:
    """The origin of a cached artifact. line: its line of the index. cause: why the node ran then."""

    line: IndexLine
    mlflow_run_id: str | None
    cause: str

    def to_json(self) -> dict[str, Any]:
        return {**attrs.asdict(self.line), "mlflow_run_id": self.mlflow_run_id, "cause": self.cause}


@frozen
class Explanation:
    """The explanation of one node's planned state. reason: the plan's reason, where no difference explains it.

    against: the run with which the node was compared, if that is not the latest.
    """

    node: str
    op: str
    cache: Cache
    key: str | None
    digest: str | None
    reason: str
    changes: tuple[Difference, ...] = ()
    inputs: tuple[InputChange, ...] = ()
    made: Made | None = None
    against: str = ""

    def to_json(self) -> dict[str, Any]:
        made = self.made.to_json() if self.made is not None else None
        return {**attrs.asdict(self), "changes": [each.to_json() for each in self.changes], "made": made}


def explain(store: Store, planner: Planner, node_id: str) -> list[Explanation]:
    """Explanations of the node, then of each node above it that will or may run, the nearest first."""
    decisions = planner.plan()
    found: list[Explanation] = []
    seen = {node_id}
    pending = deque([node_id])
    while pending:
        node = planner.graph.nodes[pending.popleft()]
        found.append(_explained(store, planner, node, decisions))
        above = [parent for parent in node.parents if parent not in seen and decisions[parent].cache != "hit"]
        seen |= set(above)
        pending += above
    return found


def _made(store: Store, key: str | None) -> Made | None:
    """The origin of the newest artifact of a key, as far as known; None without one."""
    line = store.newest(key) if key is not None else None
    if line is None or key is None:
        return None
    mlflow, cause = None, ""
    record = load_begun(store.records / line.run)
    if record is not None:
        maker = maker_of(record, line, key)
        if maker is not None:
            mlflow = sent_of(record).run_id(maker)
            cause = record.state.nodes[maker].reason
    return Made(line, mlflow, cause)


def maker_of(record: Record, line: IndexLine, key: str) -> str | None:
    """The node of a run that computed the artifact in an index line of this key; None if unknown."""
    makers = [node_id for node_id, node in record.state.nodes.items() if node.digest == line.digest]
    keys = (key, line.accepted_key)
    by_key = [node_id for node_id in makers if record.state.nodes[node_id].key in keys]
    return next(iter([*by_key, *makers]), None)


def _explained(store: Store, planner: Planner, node: GraphNode, decisions: Mapping[str, Decision]) -> Explanation:
    decision = decisions[node.id]
    whole = Explanation(node.id, node.op.name, decision.cache, decision.key, decision.digest, decision.reason)
    if decision.cache == "hit":
        return attrs.evolve(whole, made=_made(store, decision.key))
    digests = {parent: digest for parent in node.parents if (digest := decisions[parent].digest) is not None}
    previous = planner.compared_with(node, digests)
    if previous is None:
        missing = [parent for parent in node.parents if decisions[parent].cache != "hit"]
        return attrs.evolve(whole, inputs=tuple(_awaited(parent, decisions[parent], None) for parent in missing))
    found = differences(previous.parts, planner.parts[node.id])
    named = with_paths(found, attrs.asdict(node.config, recurse=False))
    return attrs.evolve(
        whole,
        against=previous.run if previous != planner.previous.get(node.id) else "",
        changes=tuple(_with_files(store, previous.run, each) for each in named),
        inputs=tuple(_inputs(store, node, decisions, previous)),
    )


def _with_files(store: Store, run: str, difference: Difference) -> Difference:
    """The difference; for a folder with the names of files that changed since the compared run."""
    record = load_begun(store.records / run) if difference.kind == "content" and difference.path and run else None
    names = [] if record is None else changed_since(Path(difference.path), record.state.started)
    return attrs.evolve(difference, path=f"{difference.path}: {listed(names, FILES_SHOWN)}") if names else difference


def _awaited(parent: str, decision: Decision, before: str | None) -> InputChange:
    return InputChange(
        parent, "runs" if decision.cache == "miss" else "may change", before, None, None, decision.reason
    )


def _inputs(store: Store, node: GraphNode, decisions: Mapping[str, Decision], previous: Previous) -> list[InputChange]:
    changes = []
    for parent in node.parents:
        decision, before = decisions[parent], previous.input_digests.get(parent)
        if decision.cache != "hit":
            changes.append(_awaited(parent, decision, before))
        elif decision.digest != before:
            made = _made(store, decision.key)
            state: InputState = "changed" if before is not None else "added"
            run, cause = (made.line.run, made.cause) if made is not None else (None, "")
            changes.append(InputChange(parent, state, before, decision.digest, run, cause))
    gone = [parent for parent in previous.input_digests if parent not in node.parents]
    return changes + [InputChange(parent, "removed", previous.input_digests[parent]) for parent in gone]


def explanation_text(explanations: Sequence[Explanation]) -> str:
    """The explanations as text, separated by empty lines."""
    return "\n\n".join("\n".join(_explanation_lines(each)) for each in explanations)


def accepted_text(user: str, at: float, reason: str) -> str:
    """A line that says who accepted an artifact as valid for changed code, when, and why."""
    return f"accepted by {user} on {moment(at)}: {reason or 'no reason given'}"


def _explanation_lines(each: Explanation) -> list[str]:
    if each.cache == "hit":
        return [
            f"{each.node}: cached as {shown_digest(each.digest)}{each.reason and f'; {each.reason}'}",
            *(_origin(each.made) if each.made is not None else []),
        ]
    lines = [difference_text(each.node, value) for value in each.changes]
    lines += [_input_text(change) for change in each.inputs]
    if not each.changes and not any(change.state != "may change" for change in each.inputs):
        lines = each.reason.split("; ") if not each.inputs else lines
    if each.reason.startswith(("artifact gone", "new", "forced")):
        lines.insert(0, each.reason)
    against = f", compared with run {each.against}" if each.against else ""
    return [f"{each.node} {WORDS[each.cache]}{against}:", *(f"  {line}" for line in dict.fromkeys(lines))]


def _input_text(change: InputChange) -> str:
    because = f" ({change.cause})" if change.cause else ""
    if change.state == "runs":
        return f"input changes: {change.producer}, which runs{because}"
    if change.state == "may change":
        return f"input may change: {change.producer}{because}"
    if change.state == "removed":
        return f"input changed: {change.producer} is no longer read"
    made = f", made by run {change.run}" if change.run else ""
    if change.state == "added":
        return f"input changed: {change.producer} is read now{made}{because}"
    return (
        f"input changed: {change.producer} from {shown_digest(change.old)} to {shown_digest(change.new)}{made}{because}"
    )


def _origin(made: Made) -> list[str]:
    line = made.line
    mlflow = f", MLflow run {made.mlflow_run_id}" if made.mlflow_run_id else ""
    at = "" if line.acceptance == "accepted" else f", on {moment(line.time)}"
    lines = [f"  made by run {line.run}{mlflow}{at}"]
    if line.acceptance == "forced":
        lines.append("  its rerun was requested (--from)")
    elif made.cause:
        lines.append(f"  it ran because: {made.cause}")
    if line.source:
        lines.append(f"  pulled from {line.source}")
    if line.acceptance == "accepted":
        accepted = accepted_text(line.user, line.time, line.reason)
        lines.append(f"  {accepted}; computed for key {shown_digest(line.accepted_key)}")
    return lines
