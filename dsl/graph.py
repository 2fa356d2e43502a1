"""Type-check and order a pipeline: `Pipeline` in, compiled `Graph` out, or every mistake at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.op import OpSpec
from dsl.pipeline import Launch, Pipeline


@frozen
class GraphNode:
    """A checked node: external paths in the config are absolute; inputs maps each edge to the ids of its producers."""

    id: str
    config: Any
    op: OpSpec
    launch: Launch
    inputs: Mapping[str, tuple[str, ...]]

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of all nodes this one reads, each once, in the order of the edges."""
        return tuple(dict.fromkeys(parent for parents in self.inputs.values() for parent in parents))


@frozen
class Graph:
    """A compiled pipeline; nodes come after all their parents, otherwise in the order they were written."""

    name: str
    seed: int
    experiment: str
    tracking_uri: str | None
    root: Path
    op_files: tuple[Path, ...]
    nodes: Mapping[str, GraphNode]

    def below(self, node_id: str) -> frozenset[str]:
        """The node and everything that reads from it, directly or not."""
        raise NotImplementedError


def compile_pipeline(pipeline: Pipeline) -> Graph:
    """Check references, artifact types, external paths and cycles. Raises PipelineError with all mistakes."""
    raise NotImplementedError
