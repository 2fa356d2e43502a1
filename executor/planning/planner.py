"""Which nodes run, and why: a function of the graph, the key parts, the store and earlier records.

A node whose inputs are known has a key, and is a hit or runs. A node below one that will run has no key yet: if its
inputs' previous digests would make it a hit, it is "maybe", since the node above may give the same bytes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from dsl.convert import flat, unstructure
from dsl.errors import StoreError
from dsl.graph import Graph, GraphNode
from executor.keys.node_key import KeyParts, node_inputs
from executor.planning.code_trust import refuse_untrusted_code, trusting_nodes, untrusted_code
from executor.store.artifact_store import Store
from executor.store.manifest import IndexLine
from executor.system.output import shown_digest

if TYPE_CHECKING:
    from executor.planning.history import PreviousNodes

Cache = Literal["hit", "miss", "maybe"]
WORDS: Mapping[Cache, str] = {"hit": "cached", "miss": "runs", "maybe": "may stay cached"}


@frozen
class Previous:
    """The state of a node in an earlier record: its key parts, input digests, artifact digest, and the run's id."""

    parts: KeyParts
    input_digests: Mapping[str, str]
    digest: str | None
    run: str = ""


@frozen
class Decision:
    """The planned treatment of a node. key, digest: None if they depend on a node that has not run.

    source_run: the run that computed a hit's artifact; None for a pinned node. acceptance: as in the index.
    """

    cache: Cache
    reason: str
    key: str | None = None
    digest: str | None = None
    source_run: str | None = None
    acceptance: str = ""


@frozen(kw_only=True)
class Planner:
    """Decides for each node whether it is cached or runs.

    parts: key parts by node id.
    previous: earlier records, used only to explain why a node is not cached.
    pinned: node id -> digest of the artifact that is kept, whatever the node's key is now.
    forced: nodes that run even if they are cached.
    absent: nodes whose data is missing, and which have no parts.
    recorded: nodes whose data is missing, but whose parts a record has: node id -> its run.
    source: the run that made the pinned artifacts.
    run: the planned run; empty before it has a record.
    trusting: nodes whose config lets a checkpoint's code run.
    given: the configs as the user gave them, in a trial run.
    """

    graph: Graph
    parts: Mapping[str, KeyParts]
    store: Store
    previous: PreviousNodes
    pinned: Mapping[str, str] = {}
    forced: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    recorded: Mapping[str, str] = {}
    source: str = "RUN"
    run: str = ""
    given: Mapping[str, Any] = {}
    trusting: frozenset[str] = attrs.Factory(lambda self: trusting_nodes(self.graph), takes_self=True)

    def with_parts(self, node_id: str, parts: KeyParts) -> Planner:
        """A planner with other key parts of one node."""
        return attrs.evolve(self, parts={**self.parts, node_id: parts})

    def plan(self) -> dict[str, Decision]:
        """The decision for every node before anything has run. Raises StoreError if a pinned artifact is gone."""
        decisions: dict[str, Decision] = {}
        known: dict[str, str] = {}
        for node_id in self.graph.nodes:
            decisions[node_id] = decision = self.decide(node_id, known)
            if decision.digest is not None:
                known[node_id] = decision.digest
        return decisions

    def decide(self, node_id: str, digests: Mapping[str, str]) -> Decision:
        """Decide for one node whether it is cached. digests: the known artifact digests of nodes before it."""
        node = self.graph.nodes[node_id]
        if node_id in self.pinned:
            return self._pinned(node_id)
        if node_id in self.absent:
            return Decision("miss", "its data is missing")
        unknown = [parent for parent in node.parents if parent not in digests]
        if unknown:
            return self._below(node, digests, unknown)
        key = self.key(node, digests)
        if hit := self.hit(node_id, key):
            return attrs.evolve(hit, reason=kept_text(self.recorded[node_id])) if node_id in self.recorded else hit
        if node_id in self.forced:
            return Decision("miss", "forced", key)
        line = self.store.newest(key)
        if line and (why := self._untrusted_code(node_id, line)):
            return Decision("miss", why, key)
        if line:
            return Decision(
                "miss", f"artifact gone: {shown_digest(line.digest)} is missing or damaged in the store", key
            )
        return Decision("miss", self._why(node, digests), key)

    def hit(self, node_id: str, key: str) -> Decision | None:
        """The cache hit for a node's key, None without one.

        A forced node accepts only an artifact of this run. Artifacts with untrusted code are never used.
        """
        line = self.store.newest(key)
        if line is None or not self.store.has(line.digest) or (node_id in self.forced and line.run != self.run):
            return None
        if self._untrusted_code(node_id, line):
            return None
        return Decision("hit", "", key, line.digest, line.run, line.acceptance)

    def _untrusted_code(self, node_id: str, line: IndexLine) -> str:
        return untrusted_code(self.store, self.graph.nodes[node_id], self.trusting, line.digest)

    def key(self, node: GraphNode, digests: Mapping[str, str]) -> str:
        return self.parts[node.id].key(node_inputs(node, digests.__getitem__))

    def _pinned(self, node_id: str) -> Decision:
        digest = self.pinned[node_id]
        if not self.store.has(digest):
            raise StoreError(
                f'the artifact of node "{node_id}" ({shown_digest(digest)}) is missing or damaged in the store; '
                f"run the node again with `dflow resume {self.source} --from {node_id}`"
            )
        refuse_untrusted_code(self.store, self.graph.nodes[node_id], self.trusting, digest)
        return Decision("hit", "", None, digest)

    def _below(self, node: GraphNode, digests: Mapping[str, str], unknown: list[str]) -> Decision:
        if node.id in self.forced:
            return Decision("miss", "forced")
        before = {each: last.digest for each in unknown if (last := self.previous.get(each)) and last.digest}
        likely = {**digests, **before}
        if len(before) == len(unknown) and self.hit(node.id, self.key(node, likely)) is not None:
            return Decision("maybe", f"input may change: {', '.join(unknown)}")
        return Decision("miss", self._why(node, digests, unknown))

    def compared_with(self, node: GraphNode, digests: Mapping[str, str]) -> Previous | None:
        """The earlier state with which a node is compared for reasons: the one with the fewest differences; None for
        none.
        """
        from executor.keys.differences import differences, distance  # only where something runs

        def count(previous: Previous) -> int:
            found = differences(previous.parts, self.parts[node.id])
            return distance(found) + bool(_changed_inputs(node, digests, previous))

        return self.previous.nearest(node.id, count)

    def _why(self, node: GraphNode, digests: Mapping[str, str], unknown: Sequence[str] = ()) -> str:
        """The reason why a node runs, unless it is forced or its artifact is lost. unknown: parents that
        will run too.
        """
        from executor.keys.differences import differences, reasons, with_given, with_paths

        previous = self.compared_with(node, digests)
        if previous is None:
            return "new"
        found = differences(previous.parts, self.parts[node.id])
        config = attrs.asdict(node.config, recurse=False)
        found = with_paths(found, config)
        if node.id in self.given:
            found = with_given(found, flat(unstructure(node.config)), flat(unstructure(self.given[node.id])))
        lines = reasons(node.id, found)
        if unknown:
            return "; ".join(lines) or f"input changes: {', '.join(unknown)}"
        if changed := _changed_inputs(node, digests, previous):
            lines.append(f"input changed: {', '.join(changed)}")
        return "; ".join(lines) or "not finished before"


def earlier_rule_note(decisions: Mapping[str, Decision], file: str = "FILE") -> str:
    """A note on how to keep artifacts of an earlier dflow.

    Empty unless some node would run only because the rule for code digests has changed.
    """
    if all(decision.cache == "hit" for decision in decisions.values()):
        return ""
    from executor.keys.differences import OTHER_RULE

    nodes = [node_id for node_id, decision in decisions.items() if decision.reason == OTHER_RULE]
    if not nodes:
        return ""
    return (
        f"{', '.join(nodes)}: an earlier dflow recorded their code by another rule: what changed in it is not known. "
        f"If what they compute is the same, `dflow accept {file}` keeps what is finished and `dflow resume --adopt` "
        "continues what is not; otherwise they run again"
    )


def kept_text(run: str) -> str:
    return f"its data is not there any more; its artifact is kept as run {run} recorded it"


def _changed_inputs(node: GraphNode, digests: Mapping[str, str], previous: Previous) -> list[str]:
    """The parents whose artifact is known to differ from that of the previous state."""
    return [each for each in node.parents if each in digests and previous.input_digests.get(each) != digests[each]]


def cached_artifacts(store: Store, decisions: Mapping[str, Decision]) -> dict[str, Path]:
    """The folder of each cached node's artifact."""
    digests = {node_id: each.digest for node_id, each in decisions.items() if each.cache == "hit"}
    return {node_id: store.object_path(digest) for node_id, digest in digests.items() if digest is not None}
