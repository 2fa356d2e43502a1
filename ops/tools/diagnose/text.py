"""Output of `dflow diagnose` for a draft: tau, a line for each check, and a verdict."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

BEHIND_STATE = 7  # columns of a state and the gap behind it


def diagnosis_text(result: Mapping[str, Any]) -> str:
    """result: the JSON values that ops/tools/diagnose/run.py writes."""
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
    if tau["corrected"] != tau["exported"]:
        head += f"; {tau['corrected']:.2f} with corrected inputs"
    if result["evaluation"] is not None:
        head += f"; {_evaluation(result['evaluation'])}"
    return "\n".join([head, *map(_folded, map(_line, result["findings"])), _verdict(result)])


def _instead(result: Mapping[str, Any]) -> str:
    return "" if result["instead_of"] is None else f", as {result['instead_of']} has none"


def _evaluation(judged: Mapping[str, Any]) -> str:
    """The run's own evaluation, and how its decoding differs."""
    ways = [] if judged["benchmark"] is None else [f"on {judged['benchmark']}"]
    ways += [] if judged["temperature"] is None else [f"at temperature {judged['temperature']:g}"]
    ways += [] if judged["block_size"] is None else [f"in blocks of {judged['block_size']}"]
    text = f"{judged['node']} reports " + ("no tau" if judged["tau"] is None else f"{judged['tau']:.2f}")
    if not ways:
        return text
    return f"{text} {' '.join(ways)}, and this is measured on the split, greedily, in whole blocks"


def _line(finding: Mapping[str, Any]) -> str:
    """One finding: causes with what to do, notes with what may help."""
    parts = [f"{_state(finding):5}  {finding['name']}: {finding['measured']}"]
    if finding["normal"]:
        parts.append(f"normal: {finding['normal']}")
    if finding["is_cause"]:
        first = f"fix {finding['explained_by']}, which explains this; if it remains, "
        parts.append(f"do: {first if finding['explained_by'] else ''}{finding['advice']}")
    elif finding["is_note"]:
        parts.append(f"may help: {finding['advice']}")
    elif finding["needs_prompts"]:
        parts.append(f"do: {finding['advice']}")
    elif not finding["is_judged"]:
        parts.append("not judged: tau is at its ceiling")
    return " | ".join(parts)


def _state(finding: Mapping[str, Any]) -> str:
    if not finding["is_measured"]:
        return "--"
    if finding["is_cause"]:
        return "CAUSE"
    if not finding["is_judged"]:
        return "-"
    return "note" if finding["is_note"] else "ok"


def _folded(line: str) -> str:
    """On a terminal, wrapped to its width and indented after the state."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * BEHIND_STATE)


def _verdict(result: Mapping[str, Any]) -> str:
    findings = result["findings"]
    causes = [finding for finding in findings if finding["is_cause"]]
    idle = [finding for finding in causes if _costs_nothing(finding)]
    costly = [finding for finding in causes if finding not in idle]
    verdicts = [
        f"{what}: {', '.join(map(_named, group))}"
        for what, group in (
            ("causes of a low tau, the largest first", costly),
            ("wrong, without effect on tau here", idle),
        )
        if group
    ]
    if not causes:
        verdicts.append("none of the usual causes of a low tau")
        for what, sign in (("not judged, as tau is at its ceiling", "is_judged"), ("not measured", "is_measured")):
            if names := [str(finding["name"]) for finding in findings if not finding[sign]]:
                verdicts.append(f"{what}: {', '.join(names)}")
    return "; ".join(verdicts)


def _costs_nothing(cause: Mapping[str, Any]) -> bool:
    return cause["gain"] is not None and f"{abs(cause['gain']):.2f}" == "0.00"


def _named(cause: Mapping[str, Any]) -> str:
    gain = "" if cause["gain"] is None or _costs_nothing(cause) else f" (tau {cause['gain']:+.2f})"
    return f"{cause['name']}{gain}" + (f" (explained by {cause['explained_by']})" if cause["explained_by"] else "")
