"""The sections that ops show of their artifacts. Each op's own function is called in a process beside this one.

What it raises, prints or imports, and how long it takes, harms nobody: a function that fails is named with the reason,
and a fresh process goes on behind it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.sections import Section
from executor.failure import killed
from executor.jsonlines import read_lines
from executor.report.carried import section_from_json

TIME_S = 120.0  # of one process
MOST_FAILURES = 20


@frozen
class Asked:
    """An artifact whose op is asked what it shows."""

    op: str
    op_files: tuple[Path, ...]
    folder: Path


@frozen
class Shown:
    """The sections of an artifact; failed: why there are none."""

    sections: Sequence[Section] = ()
    failed: str = ""


def shown_by_ops(asked: Sequence[Asked]) -> dict[Asked, Shown]:
    """What each op shows of its artifact; nothing where it has no function for that."""
    found: dict[Asked, Shown] = {}
    pending = list(dict.fromkeys(asked))
    failures = 0
    while pending:
        if failures == MOST_FAILURES:
            found |= dict.fromkeys(pending, Shown(failed=f"not asked: {failures} others failed before it"))
            break
        answers, failed = _ask(pending)
        found |= answers
        pending = [one for one in pending if one not in answers]
        if pending:  # the process ended within the first of them
            found[pending.pop(0)] = Shown(failed=failed)
            failures += 1
    return found


def _ask(asked: Sequence[Asked]) -> tuple[dict[Asked, Shown], str]:
    """The answers of one process, and why it answered no more."""
    with tempfile.TemporaryDirectory() as folder:
        request, answers = Path(folder) / "asked.json", Path(folder) / "answers.jsonl"
        request.write_text(json.dumps([_to_json(one) for one in asked]), encoding="utf-8")
        # -P: what lies in the working directory is not imported in place of dflow's own.
        command = [sys.executable, "-P", "-m", "executor.report.ask_ops", str(request), str(answers)]
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIME_S,
                check=False,
            )
            failed = _why(ended)
        except subprocess.TimeoutExpired:
            failed = f"it took longer than {TIME_S:.0f} s"
        lines = read_lines(answers)
    return {asked[line["at"]]: _answer(line) for line in lines}, failed


def _to_json(one: Asked) -> dict[str, Any]:
    return {"op": one.op, "op_files": list(map(str, one.op_files)), "folder": str(one.folder)}


def _answer(line: Mapping[str, Any]) -> Shown:
    if "failed" in line:
        return Shown(failed=str(line["failed"]))
    return Shown([section_from_json(section, Path(line["folder"])) for section in line["sections"]])


def _why(ended: subprocess.CompletedProcess[str]) -> str:
    if ended.returncode < 0:
        return killed(ended.returncode)
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with exit code {ended.returncode}"
