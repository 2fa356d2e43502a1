"""Output of `dflow diagnose` for a draft: tau, a line for each check, and a verdict."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dsl.finding import Finding, Level
from ops.tools.diagnose.judgement import CAUSE, FINE, NOTE, TARGET, UNJUDGED, UNMEASURED, is_explained

STATES: Mapping[Level, str] = {CAUSE: "CAUSE", NOTE: "note", FINE: "ok", UNJUDGED: "-", UNMEASURED: "--"}
SEPARATOR = " | "
BEHIND_STATE = 7  # columns of a state and the gap behind it


def diagnosis_text(result: Mapping[str, Any]) -> str:
    """The diagnosis as text: a line on tau, one for each finding, and the verdict.

    result: the JSON values that ops/tools/diagnose/run.py writes.
    """
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
    if result["budget"] is not None:
        head += f"; more prompts do not fit into --budget {result['budget']:g}"
    if tau["corrected"] != tau["exported"]:
        head += f"; {tau['corrected']:.2f} with corrected inputs"
    if result["evaluation"] is not None:
        head += f"; {_evaluation(result['evaluation'])}"
    findings = list(map(Finding.from_json, result["findings"]))
    return "\n".join([head, *map(_folded, map(_line, findings)), _verdict(findings, result["gains"])])


def _instead(result: Mapping[str, Any]) -> str:
    return "" if result["instead_of"] is None else f", as {result['instead_of']} has none"


def _evaluation(judged: Mapping[str, Any]) -> str:
    """A line on the run's own evaluation, and how its decoding differs."""
    ways = [] if judged["benchmark"] is None else [f"on {judged['benchmark']}"]
    ways += [] if judged["temperature"] is None else [f"at temperature {judged['temperature']:g}"]
    ways += [] if judged["block_size"] is None else [f"in blocks of {judged['block_size']}"]
    text = f"{judged['node']} reports " + ("no tau" if judged["tau"] is None else f"{judged['tau']:.2f}")
    if not ways:
        return text
    return f"{text} {' '.join(ways)}, and this is measured on the split, greedily, in whole blocks"


def _line(finding: Finding) -> str:
    """A finding as a line: what was measured and what is normal, with advice for causes and notes."""
    parts = [f"{STATES[finding.level]:5}  {finding.code}: {finding.what}".replace("\n", SEPARATOR)]
    if finding.advice:
        parts.append(f"{'may help' if finding.level == NOTE else 'do'}: {finding.advice}")
    elif finding.level == UNJUDGED:
        parts.append("not judged: tau is at its ceiling")
    return SEPARATOR.join(parts)


def _folded(line: str) -> str:
    """A line wrapped to the terminal's width, indented after the state; unchanged elsewhere."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * BEHIND_STATE)


def _verdict(findings: Sequence[Finding], gains: Mapping[str, float]) -> str:
    causes = [finding for finding in findings if finding.level == CAUSE]
    idle = [cause for cause in causes if f"{abs(gains.get(cause.code, 1)):.2f}" == "0.00"]
    costly = [
        f"{cause.code}{f' (tau {gains[cause.code]:+.2f})' if cause.code in gains else ''}"
        + (f" (explained by {TARGET})" if is_explained(cause, causes) else "")
        for cause in causes
        if cause not in idle
    ]
    verdicts = [f"causes of a low tau, the largest first: {', '.join(costly)}"] if costly else []
    if idle:
        verdicts.append(f"wrong, without effect on tau here: {', '.join(cause.code for cause in idle)}")
    if not causes:
        verdicts.append("none of the usual causes of a low tau")
        for what, level in (("not judged, as tau is at its ceiling", UNJUDGED), ("not measured", UNMEASURED)):
            if names := [finding.code for finding in findings if finding.level == level]:
                verdicts.append(f"{what}: {', '.join(names)}")
    return "; ".join(verdicts)
