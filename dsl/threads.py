"""How many CPU threads a node makes use of; it counts where `launch.threads` is 0.

An op says so by its hook `threads(config, folders)` (dsl/op_class.py): the most threads that a rank makes use of, or
None for as many as there are. folders: by edge, the artifacts that the node reads (None without one, a tuple for a
`tuple` edge). Threads change the rounding, so the hook goes by these two only: never by the machine, by what else runs,
or by a clock. That is why it is no part of an Estimate, which knows the free disk and may come from a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsl.errors import ConfigError, shortened
from dsl.graph import GraphNode
from dsl.hooks import hook
from dsl.op_class import Folders


def useful_threads(node: GraphNode, made: Mapping[str, Path]) -> int | None:
    """The number of threads beyond which a rank gains nothing; None where the op sets no limit.

    made: artifact folders by node id; a missing one counts as unknown. Raises ConfigError where the op's hook fails.
    """
    try:
        limit: Callable[[Any, Folders], int | None] | None = hook(node.op, "threads")
        if limit is None:
            return None
        threads = limit(node.config, node.by_edge(made))
    except Exception as error:  # noqa: BLE001 - the op's author wrote it: one node fails, not the run
        problem = f"{type(error).__name__}: {error}"
    else:
        if threads is None or (type(threads) is int and threads > 0):
            return threads
        problem = f"it returned {threads!r}, not a number of threads or None"
    raise ConfigError(f'threads() of op "{node.op.name}" failed: {shortened(problem)}')
