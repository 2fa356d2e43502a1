"""The process in which an op describes its artifact as a logged model, isolated from its errors and imports.

    python -m executor.tracking.ask_model OP FOLDER [OP_FILE ...]

Prints the description as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from dsl.errors import StageError
from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from dsl.op_table import load_op
from executor.system.supervisor import run_module
from ops.lib.logged_model import LoggedModel, Tensor

WITHIN_S = 30.0


def described(graph: Graph, node: GraphNode, folder: Path) -> LoggedModel:
    """The op's description of a node's artifact. Raises StageError where it is invalid."""
    arguments = (node.op.name, str(folder), *map(str, graph.op_files))
    asked = run_module("executor.tracking.ask_model", *arguments, within_s=WITHIN_S)
    if asked.code != 0:
        raise StageError(f'logged_model() of op "{node.op.name}" failed: {asked.reason}')
    told: dict[str, Any] = json.loads(asked.output)
    tensors = {name: tuple(_tensor(each) for each in told[name]) for name in ("inputs", "outputs")}
    return LoggedModel(**{**told, **tensors})


def main() -> int:
    op, folder, *op_files = sys.argv[1:]
    describe: Callable[[Path], LoggedModel] | None = hook(load_op(op, tuple(map(Path, op_files))), "logged_model")
    assert describe is not None
    sys.stdout.write(json.dumps(attrs.asdict(describe(Path(folder)))))
    return 0


def _tensor(told: dict[str, Any]) -> Tensor:
    return Tensor(told["name"], told["dtype"], tuple(told["shape"]))


if __name__ == "__main__":
    sys.exit(main())
