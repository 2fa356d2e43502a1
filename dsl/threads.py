"""How many CPU threads a node makes use of, by its op's word; it counts where `launch.threads` is 0.

An op names a function with `@op(..., threads="module:function")`. It gets the config and, by edge, the folders of the
artifacts that the node reads (None without one, a tuple for a `tuple` edge), and returns the most threads that a rank
makes use of, or None for as many as there are. Threads change the rounding, so the function goes by these two alone:
never by the machine, by what else runs, or by a clock. It loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsl.errors import ConfigError, shortened
from dsl.graph import GraphNode
from dsl.named_function import named_function

Folders = Mapping[str, Path | tuple[Path, ...] | None]


def useful_threads(node: GraphNode, made: Mapping[str, Path]) -> int | None:
    """The most threads of a rank, None where the op names no limit. made: artifacts by node id, those that the node
    reads among them; one that is gone counts as none. Raises ConfigError where the op's function fails.
    """
    if node.op.threads is None:
        return None
    try:
        function: Callable[[Any, Folders], int | None] = named_function(node.op.threads)
        threads = function(node.config, _folders(node, made))
    except Exception as error:  # noqa: BLE001 - the op's author wrote it: one node fails, not the run
        problem = f"{type(error).__name__}: {error}"
    else:
        if threads is None or (type(threads) is int and threads > 0):
            return threads
        problem = f"it returned {threads!r}, not a number of threads or None"
    raise ConfigError(f'the function {node.op.threads} of op "{node.op.name}" failed: {shortened(problem)}')


def _folders(node: GraphNode, made: Mapping[str, Path]) -> Folders:
    folders: dict[str, Path | tuple[Path, ...] | None] = {}
    for name, edge in node.op.edges.items():
        read = tuple(made[parent] for parent in node.inputs.get(name, ()) if parent in made)
        folders[name] = read if edge.many else next(iter(read), None)
    return folders
