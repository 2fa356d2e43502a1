"""The process in which an op describes its artifact as a logged model, isolated from its errors and imports.

    python -m executor.tracking.logged_model_process OP FOLDER [OP_FILE ...]

Prints the description as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from dsl.convert import structure, unstructure
from dsl.draft_folders import use_draft_folders
from dsl.errors import StageError, StructureError
from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from dsl.op_table import load_op
from executor.system.supervisor import run_module
from ops.lib.logged_model import LoggedModel

WITHIN_S = 30.0


def described(graph: Graph, node: GraphNode, folder: Path) -> LoggedModel:
    """The op's description of a node's artifact. Raises StageError where it is invalid."""
    arguments = (node.op.name, str(folder), *map(str, graph.op_files))
    done = run_module("executor.tracking.logged_model_process", *arguments, within_s=WITHIN_S)
    if done.code != 0:
        raise StageError(f'logged_model() of op "{node.op.name}" failed: {done.reason}')
    try:
        return structure(LoggedModel, json.loads(done.output))
    except StructureError as error:
        raise StageError(f'logged_model() of op "{node.op.name}" is invalid: {error}') from error


def main() -> int:
    op, folder, *names = sys.argv[1:]
    op_files = tuple(map(Path, names))
    use_draft_folders(op_files)
    describe: Callable[[Path], LoggedModel] | None = hook(load_op(op, op_files), "logged_model")
    assert describe is not None
    sys.stdout.write(json.dumps(unstructure(describe(Path(folder)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
