"""The process in which an op describes its artifact as a logged model: what it raises or imports harms nobody.

    python -m executor.tracking.ask_model OP FOLDER [OP_FILE ...]

Prints the description as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs

from dsl.errors import StageError
from dsl.graph import Graph, GraphNode
from dsl.op_table import load_op
from executor.keys.node_key import PROJECT
from ops.lib.logged_model import LoggedModel, Tensor, logged_model

WITHIN_S = 30.0


def described(graph: Graph, node: GraphNode, folder: Path) -> LoggedModel:
    """What the op of the node says of its artifact. Raises StageError where it says nothing sensible."""
    # -P: what lies in the working directory is not imported in place of dflow's own.
    command = [
        sys.executable,
        "-P",
        "-m",
        "executor.tracking.ask_model",
        node.op.name,
        str(folder),
        *map(str, graph.op_files),
    ]
    try:
        asked = subprocess.run(
            command,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StageError(f"{node.op.model} took longer than {WITHIN_S:.0f} s") from error
    if asked.returncode != 0:
        lines = asked.stderr.strip().splitlines() or [f"it ended with exit code {asked.returncode}"]
        raise StageError(f"{node.op.model}: {lines[-1]}")
    told: dict[str, Any] = json.loads(asked.stdout)
    tensors = {name: tuple(_tensor(each) for each in told[name]) for name in ("inputs", "outputs")}
    return LoggedModel(**{**told, **tensors})


def main() -> int:
    op, folder, *op_files = sys.argv[1:]
    model = logged_model(load_op(op, tuple(map(Path, op_files))), Path(folder))
    assert model is not None
    sys.stdout.write(json.dumps(attrs.asdict(model)))
    return 0


def _tensor(told: dict[str, Any]) -> Tensor:
    return Tensor(told["name"], told["dtype"], tuple(told["shape"]))


if __name__ == "__main__":
    sys.exit(main())
