"""What a run records of a cached node: the run that made its artifact, and that run's metrics and warnings."""

from __future__ import annotations

from executor.planning.planner import Decision
from executor.records.run_record import NodeState, Record, load_begun
from executor.store.artifact_store import Store
from executor.store.digests import MANIFEST
from executor.store.manifest import Manifest
from executor.store.run_measurements import own_files


class SourceRuns:
    """The runs that computed the cached artifacts; the record of each is read once, when it is first needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made: dict[str, dict[str | None, NodeState]] = {}

    def take(self, record: Record, node_id: str, decision: Decision) -> None:
        """Make the node's state in the record that of a hit.

        If this run itself committed the artifact, just before it was killed, the node is its own.
        """
        state = record.state.nodes[node_id]
        state.state, state.key, state.digest, state.error = "done", decision.key, decision.digest, None
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
        """The metrics in the manifest that the source run wrote, and a warning if that manifest is gone.

        The artifact may have the manifest of an earlier run with the same content and other measurements.
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
        """The node of a run that computed a key's artifact, maybe for another key; None without its record."""
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
        state.seconds = max(0.0, state.ended - state.started)
        state.metrics = final_metrics(record.events_path, node_id)
