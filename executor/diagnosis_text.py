"""What `dflow diagnose` prints of a draft: tau, a line for each check, and a verdict."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

BEHIND_STATE = 7  # columns of a state and the gap behind it


def diagnosis_text(result: Mapping[str, Any]) -> str:
    """result: the JSON values that ops/diagnose/run.py lays down."""
    tau = result["tau"]
    measured = "no tau, as the export cannot be used,"
    if tau["exported"] is not None:
        measured = f"tau {tau['exported']:.2f}"
    if tau["low"] is not None:
        measured += f" [{tau['low']:.2f}, {tau['high']:.2f}]"
    head = (
        f"{result['node']}: {measured} of at most {result['block_size']}, on {result['prompts']} prompts of "
        f"{result['split']}{_instead(result)} ({result['dtype']}, {result['device']})"
    )
    if tau["mended"] != tau["exported"]:
        head += f"; {tau['mended']:.2f} with what it is fed put right"
    if result["evaluation"] is not None:
        head += f"; {_evaluation(result['evaluation'])}"
    return "\n".join([head, *map(_folded, map(_line, result["findings"])), _verdict(result)])


def _instead(result: Mapping[str, Any]) -> str:
    return "" if result["instead_of"] is None else f", as {result['instead_of']} holds none"


def _evaluation(judged: Mapping[str, Any]) -> str:
    """What the run's own evaluation says, and in what it decodes otherwise."""
    ways = [] if judged["benchmark"] is None else [f"on {judged['benchmark']}"]
    ways += [] if judged["temperature"] is None else [f"at temperature {judged['temperature']:g}"]
    ways += [] if judged["block_size"] is None else [f"in blocks of {judged['block_size']}"]
    said = f"{judged['node']} reports " + ("no tau" if judged["tau"] is None else f"{judged['tau']:.2f}")
    if not ways:
        return said
    return f"{said} {' '.join(ways)}, and this is measured on the split, greedily, in whole blocks"


def _line(finding: Mapping[str, Any]) -> str:
    """What to do is told of causes, and what may help of notes."""
    parts = [f"{_state(finding):5}  {finding['name']}: {finding['measured']}"]
    if finding["normal"]:
        parts.append(f"normal: {finding['normal']}")
    if finding["is_cause"]:
        first = f"put {finding['explained_by']} right, which explains this; if it stays, "
        parts.append(f"do: {first if finding['explained_by'] else ''}{finding['advice']}")
    elif finding["is_note"]:
        parts.append(f"may help: {finding['advice']}")
    return " | ".join(parts)


def _state(finding: Mapping[str, Any]) -> str:
    if not finding["is_measured"]:
        return "--"
    if finding["is_cause"]:
        return "CAUSE"
    return "note" if finding["is_note"] else "ok"


def _folded(line: str) -> str:
    """On a terminal folded to its width, the rest of the line behind the state."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * BEHIND_STATE)


def _verdict(result: Mapping[str, Any]) -> str:
    causes = [
        finding["name"]
        + ("" if finding["gain"] is None else f" (tau {finding['gain']:+.2f})")
        + (f" (explained by {finding['explained_by']})" if finding["explained_by"] else "")
        for finding in result["findings"]
        if finding["is_cause"]
    ]
    if causes:
        return f"causes of a low tau, the weightiest first: {', '.join(causes)}"
    left = [str(finding["name"]) for finding in result["findings"] if not finding["is_measured"]]
    return "none of the usual causes of a low tau" + (f"; not measured: {', '.join(left)}" if left else "")
