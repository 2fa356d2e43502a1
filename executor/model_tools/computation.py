"""A computation for a command in a separate process, since this one must not load torch, in a stage's environment.

It ends with this process. What they exchange has no names in the file system, so no files remain however it ends.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import DataError, DflowError
from dsl.graph import Graph, graph_to_json
from dsl.stage import NOW
from dsl.threads import useful_threads
from executor.launchers.stage_environment import stage_environment
from executor.system.resource_pool import threads_of
from executor.system.supervisor import ChildGroup, exit_text, module_command

LOG_LINES = 20

Result = Mapping[str, Any]
Artifacts = Mapping[str, tuple[Path, str]]  # node -> folder and digest of its artifact


def computed(
    what: str,
    module: str,
    graph: Graph,
    node_id: str,
    artifacts: Artifacts,
    show: Callable[[str], None] = lambda text: None,
    **values: Any,
) -> Result:
    """The JSON that `python -m MODULE REQUEST RESULT` wrote for a node. what: its name in an error; show: called with
    each step; values: what the request holds besides graph, node and artifacts, in JSON values.

    Raises DataError where it refused, DflowError where it failed.
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
    """The exit code, and the last lines that do not name steps. files: of the request and the result."""
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
