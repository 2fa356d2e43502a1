"""What earlier runs recorded of nodes, read only when needed: their last states, and the origin of cached artifacts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from attrs import frozen

from dsl.artifact_digest import MANIFEST
from dsl.graph import GraphNode
from executor.keys.node_key import EXTERNAL_FILES, KeyParts, key_config, named_paths
from executor.planning.planner import Decision, Previous
from executor.records.graph_file import recorded_nodes
from executor.records.run_record import NodeState, PlanRow, Record, load_begun, newest_records, plan_of
from executor.store.artifact_store import Store
from executor.store.manifest import Manifest, own_files

RECORDS_SEARCHED = 50
RUNS_COMPARED = 10


@frozen
class Earlier:
    """An earlier record of the pipeline: its nodes, and the rows of its plan."""

    nodes: Mapping[str, NodeState]
    rows: Mapping[str, PlanRow]
    run: str = ""


@frozen
class Content:
    """The digests of a node's external content, by field or list member. run: the run whose record has them."""

    digests: Mapping[str, str]
    run: str


class SourceRuns:
    """The records of runs that computed cached artifacts; each is read once, when needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made: dict[str, dict[str | None, NodeState]] = {}

    def set_hit(self, record: Record, node_id: str, decision: Decision) -> None:
        """Make the node's state in the record that of a hit.

        If this run itself committed the artifact, just before it was killed, the node is its own.
        """
        state = record.state.nodes[node_id]
        state.state, state.key, state.digest, state.failure = "done", decision.key, decision.digest, None
        if state.started and decision.source_run == record.run:
            self._own(record, node_id, state)
            return
        state.cache, state.reason, state.started = "hit", "", None
        state.source_run, state.acceptance = decision.source_run, decision.acceptance
        made = self.made(decision.source_run, decision.key)
        if made is not None and made.state == "done":
            state.metrics, state.warnings = made.metrics, made.warnings
        else:
            state.metrics, state.warnings = self._sealed(decision)

    def _sealed(self, decision: Decision) -> tuple[dict[str, float], list[str]]:
        """The metrics that the source run wrote to the artifact's manifest, and a warning if that manifest is gone.

        The artifact may have an earlier run's manifest, with equal content but other measurements.
        """
        if decision.digest is None:
            return {}, []
        folder, run, key = self._store.object_path(decision.digest), decision.source_run, decision.key
        own = own_files(self._store.records, run, self._store.computed_key(run, key), folder)
        if MANIFEST in own:
            manifest = Manifest.read(own[MANIFEST])
            return ({} if manifest is None else dict(manifest.metrics)), []
        other = Manifest.of(folder)
        if other is None or not other.metrics:
            return {}, []
        return {}, [f"the metrics of run {run}, which made this artifact, are missing; run {other.run} made the same"]

    def made(self, run: str | None, key: str | None) -> NodeState | None:
        """The state of the node that computed a key's artifact in a run, maybe under another key; None without its
        record.
        """
        if run is None or key is None:
            return None
        if run not in self._made:
            maker = load_begun(self._store.records / run)
            nodes = maker.state.nodes.values() if maker is not None else ()
            self._made[run] = {node.key: node for node in nodes if node.cache != "hit"}
        return self._made[run].get(key) or self._made[run].get(self._store.computed_key(run, key))

    def _own(self, record: Record, node_id: str, state: NodeState) -> None:
        from executor.records.events import final_metrics

        line = self._store.newest(state.key or "")
        assert line is not None and state.started is not None
        state.ended = line.time
        manifest = None if state.digest is None else self._store.manifest(state.digest)
        is_own = manifest is not None and (manifest.run, manifest.key) == (record.run, state.key)
        whole = manifest.seconds if manifest is not None and is_own else None
        state.seconds = max(0.0, state.ended - state.started) if whole is None else whole
        state.metrics = final_metrics(record.events_path, node_id)


class PreviousNodes:
    """The earlier states of each node: from the newest record that finished it, else the newest that began it."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._sources = SourceRuns(store)
        self._read: list[Earlier] = []
        self._unread = self._earlier(pipeline)
        self._known: dict[str, Previous | None] = {}

    def get(self, node_id: str) -> Previous | None:
        if node_id not in self._known:
            self._known[node_id] = self._found(node_id)
        return self._known[node_id]

    def nearest(self, node_id: str, differences: Callable[[Previous], int]) -> Previous | None:
        """The earlier state of a node with the fewest differences, in any record that finished it; the newest of
        several.

        After an undone experiment, that is the state before the experiment.
        """
        best = self.get(node_id)
        if best is None or best.digest is None:
            return best
        fewest = differences(best)
        for earlier in islice(self._records(), RUNS_COMPARED):
            if fewest <= 1:  # a node that has to run differs by one at least
                break
            previous = previous_in(self._store, earlier, node_id)
            if previous is not None and previous.digest is not None and differences(previous) < fewest:
                best, fewest = previous, differences(previous)
        return best

    def computed(self, node_id: str) -> NodeState | None:
        """The node's state when it was last computed, with duration and memory; None if that is not known."""
        for earlier in self._records():
            state = earlier.nodes.get(node_id)
            if state is not None and state.state == "done":
                made = state if state.cache != "hit" else self._sources.made(state.source_run, state.key)
                if made is not None and made.seconds is not None:
                    return made
        return None

    def content(self, node: GraphNode) -> Content | None:
        """The recorded digests of a node's external data, from the newest record in which the node names the same
        paths.

        None without one, or where other config values chose the external files.
        """
        from executor.keys.differences import is_different  # only where data is gone

        paths = {name: str(path) for name, path in named_paths(node).items()}
        for earlier in self._records():
            state, row = earlier.nodes.get(node.id), earlier.rows.get(node.id)
            parts = None if state is None or row is None else _parts(self._store, state) or row.parts
            before = recorded_nodes(self._store.records / earlier.run).get(node.id)
            if parts is None or before is None or not paths.items() <= _texts(before.config).items():
                continue
            is_other = EXTERNAL_FILES in parts.external and is_different(parts.config, key_config(node))
            return (
                None if is_other or not paths.keys() <= parts.external.keys() else Content(parts.external, earlier.run)
            )
        return None

    def _found(self, node_id: str) -> Previous | None:
        present = None
        for earlier in self._records():
            previous = previous_in(self._store, earlier, node_id)
            if previous is not None and previous.digest is not None:
                return previous
            if previous is not None and earlier.nodes[node_id].attempt:  # a node that only waited does not count
                present = present or previous
        return present

    def _records(self) -> Iterator[Earlier]:
        """The earlier records, the newest first; each is read once."""
        yield from self._read
        for earlier in self._unread:
            self._read.append(earlier)
            yield earlier

    def _earlier(self, pipeline: str) -> Iterator[Earlier]:
        for record in islice(newest_records(self._store.records, pipeline), RECORDS_SEARCHED):
            yield Earlier(record.state.nodes, plan_of(record.folder), record.run)


def previous_in(store: Store, earlier: Earlier, node_id: str) -> Previous | None:
    """A node as in one record; None if the record lacks it or its key parts are gone."""
    if node_id not in earlier.rows or node_id not in earlier.nodes:
        return None
    row, state = earlier.rows[node_id], earlier.nodes[node_id]
    parts = row.parts or _parts(store, state)
    if parts is None:
        return None
    parents = [parent for parent in row.parents if parent in earlier.nodes]
    inputs = {parent: digest for parent in parents if (digest := earlier.nodes[parent].digest) is not None}
    return Previous(parts, inputs, state.digest, earlier.run)


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The text values of a config by field, and those in its lists by member, such as "field[0]"."""
    lists = {name: value for name, value in config.items() if isinstance(value, list)}
    members = {f"{name}[{place}]": member for name, value in lists.items() for place, member in enumerate(value)}
    return {name: value for name, value in {**config, **members}.items() if isinstance(value, str)}


def _parts(store: Store, state: NodeState) -> KeyParts | None:
    """The key parts with which the artifact of a cached node was computed.

    They are in the artifact's manifest, or if another key made the artifact first, in the plan of the source run.
    """
    key = store.computed_key(state.source_run, state.key)
    manifest = store.manifest(state.digest) if state.digest is not None else None
    if manifest is not None and manifest.key == key:
        return manifest.key_parts
    rows = plan_of(store.records / (state.source_run or "-")).values()
    return next((row.parts for row in rows if row.key == key and row.parts is not None), None)
