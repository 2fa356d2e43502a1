"""How many CPU threads a node makes use of, by its op's word; it counts where `launch.threads` is 0.

An op names a function with `@op(..., threads="module:function")`. It gets the config and, by edge, the folders of the
artifacts that the node reads (None without one, a tuple for a `tuple` edge), and returns the most threads that a rank
makes use of, or None for as many as there are. Threads change the rounding, so the function goes by these two alone:
never by the machine, by what else runs, or by a clock. It loads no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsl.graph import GraphNode

Folders = Mapping[str, Path | tuple[Path, ...] | None]


def useful_threads(node: GraphNode, made: Mapping[str, Path]) -> int | None:
    """The most threads of a rank, None where the op names no limit. made: artifacts by node id, those that the node
    reads among them; one that is gone counts as none.
    """
    if node.op.threads is None:
        return None
    module, _, name = node.op.threads.partition(":")
    function: Callable[[Any, Folders], int | None] = getattr(importlib.import_module(module), name)
    return function(node.config, _folders(node, made))


def _folders(node: GraphNode, made: Mapping[str, Path]) -> Folders:
    folders: dict[str, Path | tuple[Path, ...] | None] = {}
    for name, edge in node.op.edges.items():
        read = tuple(made[parent] for parent in node.inputs.get(name, ()) if parent in made)
        folders[name] = read if edge.many else next(iter(read), None)
    return folders
