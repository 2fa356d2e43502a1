"""The winner's pipeline file: it extends the tuned one, with the winner's values, and goes on from its last rung."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DflowError
from dsl.files import output_errors, replace_file
from dsl.shown import BARE_KEY, toml_value
from dsl.tree import merged
from dsl.tune import CONTINUES, PAUSE, changed_nodes, trial_name, with_chain
from executor.tune.decision import Decision
from executor.tune.trials import Trials

MARK = "# Written by `dflow tune"
CHECKSUM = "# It is written anew as long as its checksum is that of the lines below: "


def default_path(file: Path) -> Path:
    return file.with_name(f"{file.stem}_best.toml")


def is_winners(path: Path) -> bool:
    """Whether `dflow tune` wrote a pipeline file."""
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(MARK)


def check_writable(path: Path) -> None:
    """Check that the file is not one of the user's, nor changed by the user. Raises DflowError."""
    if not path.exists():
        return
    if not is_winners(path):
        raise DflowError(f"{path}: there is a file that `dflow tune` did not write; name another by -o FILE")
    _, checksum, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if checksum != CHECKSUM + _checksum("\n".join(lines)):
        raise DflowError(f"{path}: it was changed since `dflow tune` wrote it; rename it, or name another by -o FILE")


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_winner(path: Path, file: Path, trials: Trials, decision: Decision) -> bool:
    """Write the winner's pipeline file. Returns whether it changed. Raises StoreError where it cannot be written."""
    assert decision.winner is not None
    text = winner_text(path, file, trials, decision.winner, [rung.steps for rung in decision.rungs])
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    with output_errors(path):
        replace_file(path, text.encode())
    return True


def winner_text(path: Path, file: Path, trials: Trials, winner: int, rungs: list[int]) -> str:
    """The text of the winner's file at `path`. rungs: those that the winner reached."""
    tune, point = trials.tune, trials.points.tried[winner]
    node = tune.table.node
    changes = changed_nodes(point)
    nodes = dict(trials.nodes)
    nodes[node] = merged(nodes[node], changes.get(node, {}))
    chained = with_chain(nodes, tune, rungs)
    last = {CONTINUES: chained[node][CONTINUES]}
    tables = {tune.rung_node(steps): chained[tune.rung_node(steps)] for steps in rungs}
    tables |= changes | {node: {**changes.get(node, {}), **last}}
    extends = os.path.relpath(file.absolute(), path.absolute().parent)
    first = f"{MARK} {file.name}`: trial {trial_name(winner)}, the best at step {rungs[-1]}."
    head = [
        f"# `{node}` goes on from there to the end of the plan of batches; the steps before are in the store. To train",
        f"# it in one go instead, take out the nodes with {PAUSE}, and {CONTINUES}.",
        "",
        f"extends = {toml_value(extends)}",
    ]
    rest = "\n".join([*head, *(line for name, table in tables.items() for line in _table(name, table)), ""])
    return f"{first}\n{CHECKSUM}{_checksum(rest)}\n{rest}"


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in values.items()]
    return ["", f"[node.{_key(name)}]", *lines]


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else json.dumps(key)
