"""The sections that ops show of their artifacts. Each op's own function is called in a process beside this one.

What it raises, prints, imports or starts, and how long it takes, harms nobody: a function that fails is named with the
reason, and a fresh process goes on behind it. All together have a time: a report is written soon whatever they do.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from executor.system.jsonlines import read_lines
from executor.system.supervisor import Finished, run_module
from ops.lib.report_sections import Account, Body, Chart, Html, Picture, Section, Series, Table

BODIES: dict[str, type[Body]] = {kind.__name__: kind for kind in (Table, Chart, Html, Picture, Account)}
TIME_S = 20.0  # of one op's function
TOTAL_S = 30.0  # of all; the report of a run that MLflow gets is waited for a little longer


@frozen
class Asked:
    """An artifact whose op is asked what it shows. own: name and path of its files outside the digest."""

    op: str
    op_files: tuple[Path, ...]
    folder: Path
    own: tuple[tuple[str, Path], ...]


@frozen
class Shown:
    """The sections of an artifact; failed: why there are none."""

    sections: Sequence[Section] = ()
    failed: str = ""


def shown_by_ops(asked: Sequence[Asked]) -> dict[Asked, Shown]:
    """What each op shows of its artifact; nothing where it has no function for that."""
    found: dict[Asked, Shown] = {}
    pending = list(dict.fromkeys(asked))
    end = time.monotonic() + TOTAL_S
    while pending:
        left = end - time.monotonic()
        if left <= 0:
            found |= dict.fromkeys(pending, Shown(failed=f"all ops together took longer than {TOTAL_S:g} s"))
            break
        answers, failed = _ask(pending, left)
        found |= answers
        pending = [one for one in pending if one not in answers]
        if pending:  # the process ended within the first of them
            found[pending.pop(0)] = Shown(failed=failed)
    return found


def _ask(asked: Sequence[Asked], left: float) -> tuple[dict[Asked, Shown], str]:
    """The answers of one process, and why it answered no more. left: seconds that it has."""
    with tempfile.TemporaryDirectory() as folder:
        request, answers = (Path(folder) / name for name in ("asked.json", "answers.jsonl"))
        views = (Path(folder) / f"view-{at}" for at in range(len(asked)))
        request.write_text(json.dumps(list(map(_to_json, asked, views))), encoding="utf-8")
        arguments = (str(request), str(answers), str(TIME_S))
        done = run_module("executor.report.section_worker", *arguments, within_s=left)
        lines = read_lines(answers)
    return {asked[line["at"]]: _answer(line, asked[line["at"]].folder) for line in lines}, _why(done)


def _why(done: Finished) -> str:
    """Why the process answered no more."""
    if done.code is None:
        return f"all ops together took longer than {TOTAL_S:g} s"
    return f"it took longer than {TIME_S:g} s" if done.code == -signal.SIGALRM else done.reason


def _to_json(one: Asked, view: Path) -> dict[str, Any]:
    """view: where a folder with the run's own files is to be made."""
    own = {name: str(path) for name, path in one.own}
    return {
        "op": one.op,
        "op_files": list(map(str, one.op_files)),
        "folder": str(one.folder),
        "own": own,
        "view": str(view),
    }


def _answer(line: Mapping[str, Any], folder: Path) -> Shown:
    if "failed" in line:
        return Shown(failed=str(line["failed"]))
    return Shown([section_from_json(section, folder) for section in line["sections"]])


def section_to_json(section: Section, folder: Path) -> dict[str, Any]:
    """Raises TypeError for a body of another kind; a picture's path is relative to the artifact's folder."""
    body = section.body
    kind = type(body).__name__
    if kind not in BODIES:
        raise TypeError(f'section "{section.title}": a body is one of {", ".join(BODIES)}, not {kind}')
    if isinstance(body, Picture):
        path = folder / body.path
        values: dict[str, Any] = {"path": str(path.relative_to(folder) if path.is_relative_to(folder) else path)}
        values["alt"] = body.alt
    elif isinstance(body, Chart):
        values = attrs.asdict(body)
    else:
        values = attrs.asdict(body, recurse=False)
    return {"title": section.title, "note": section.note, "kind": kind, "body": values}


def section_from_json(data: Mapping[str, Any], folder: Path) -> Section:
    values = dict(data["body"])
    if data["kind"] == "Chart":
        values["series"] = [Series(**series) for series in values["series"]]
    if data["kind"] == "Picture":
        values["path"] = folder / values["path"]
    return Section(data["title"], BODIES[data["kind"]](**values), data["note"])
