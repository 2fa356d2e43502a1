"""An explanation as a user reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.explain.reasons import ABSENT, Explanation, InputChange, Made, ValueChange
from executor.keys.code_diff import told

HEADS = {"hit": "cached", "miss": "runs", "maybe": "may be cut off"}


def explanation_text(explanations: Sequence[Explanation], roots: Sequence[Path]) -> str:
    """The node, and behind an empty line each one above it."""
    return "\n\n".join("\n".join(_lines(each, roots)) for each in explanations)


def accepted_text(user: str, at: float, reason: str) -> str:
    """Who declared an artifact valid for other code."""
    return f"accepted by {user} on {moment(at)}: {reason or 'no reason given'}"


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def module_file(module: str, roots: Sequence[Path]) -> str:
    """A module's file relative to its root; the module's name where it is gone."""
    for root in roots:
        for name in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
            if (root / name).is_file():
                return name
    return module


def _lines(each: Explanation, roots: Sequence[Path]) -> list[str]:
    if each.cache == "hit":
        return [f"{each.node}: cached as {_short(each.digest)}", *(_made(each.made) if each.made is not None else [])]
    lines = [value_text(each.node, change) for change in each.values]
    code = told(each.code, lambda module: module_file(module, roots))
    lines += [line if line.startswith(" ") else f"code changed: {line}" for line in code]
    lines += [_input(change) for change in each.inputs]
    if not each.values and not each.code and not any(change.state != "may change" for change in each.inputs):
        lines = each.said.split("; ") if not each.inputs else lines
    if each.said.startswith(("artifact gone", "new", "forced")):
        lines.insert(0, each.said)
    against = f", compared with run {each.against}" if each.against else ""
    return [f"{each.node} {HEADS[each.cache]}{against}:", *(f"  {line}" for line in dict.fromkeys(lines))]


def value_text(node: str, change: ValueChange) -> str:
    """One line: the kind of change, its name, the old and the new value."""
    name = change.name if change.kind in ("library", "op") else f"{node}.{change.name}"
    place = f" ({change.path})" if change.path else ""
    return f"{change.kind} changed: {name}{place} {_from_to(change)}"


def _from_to(change: ValueChange) -> str:
    if change.old is ABSENT:
        return f"set to {_shown(change, change.new)}"
    if change.new is ABSENT:
        return f"no longer there, was {_shown(change, change.old)}"
    return f"from {_shown(change, change.old)} to {_shown(change, change.new)}"


def _shown(change: ValueChange, value: Any) -> str:
    return str(value)[:12] if change.kind == "content" else json.dumps(value, ensure_ascii=False)


def _input(change: InputChange) -> str:
    because = f" ({change.cause})" if change.cause else ""
    if change.state == "runs":
        return f"input changes: {change.producer}, which runs{because}"
    if change.state == "may change":
        return f"input may change: {change.producer}{because}"
    if change.state == "removed":
        return f"input changed: {change.producer} is no longer read"
    made = f", made by run {change.run}" if change.run else ""
    if change.state == "added":
        return f"input changed: {change.producer} is read now{made}{because}"
    return f"input changed: {change.producer} from {_short(change.old)} to {_short(change.new)}{made}{because}"


def _made(made: Made) -> list[str]:
    mlflow = f", MLflow run {made.mlflow_run_id}" if made.mlflow_run_id else ""
    computed = f"made by run {made.run}{mlflow}"
    lines = [f"  {computed}" if made.acceptance == "accepted" else f"  {computed}, on {moment(made.time)}"]
    if made.acceptance == "forced":
        lines.append("  it was told to run anew (--from)")
    elif made.cause:
        lines.append(f"  it ran because: {made.cause}")
    if made.source:
        lines.append(f"  pulled from {made.source}")
    if made.acceptance == "accepted":
        lines.append(f"  {accepted_text(made.user, made.time, made.reason)}; computed for key {made.accepted_key[:12]}")
    return lines


def _short(digest: str | None) -> str:
    return (digest or "")[:12]
