"""Which split a node of a smoke run left empty, though the data has samples of it: few samples may be the cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from dsl.graph import Graph
from ops.artifacts import ImageSamples, Samples, TokenShards
from ops.lib.data.sample_account import source_splits, summary_splits


@frozen
class EmptiedSplit:
    """entered: samples of the split that reached the node; full: those of the whole data, None where not counted."""

    node: str
    split: str
    entered: int
    full: int | None

    def __str__(self) -> str:
        of_data = "" if self.full is None else f", of {self.full} in the full data"
        return f'{self.node} left the split "{self.split}" empty ({self.entered} reached it{of_data})'


def emptied_splits(graph: Graph, artifacts: Mapping[str, Path], failed: str) -> list[EmptiedSplit]:
    """Of the nodes above the failed one; artifacts: of the nodes that are done."""
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
