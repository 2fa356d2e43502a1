"""What ops say of their artifacts: sections of reports, of one or of several together, and descriptions of models. Each
op's own function is called in a separate process.

    python -m executor.results.op_hooks REQUESTS.json ANSWERS.jsonl SECONDS

What a function raises, prints, imports or starts, and how long it takes, does not affect the caller: the process ends,
by SIGALRM after SECONDS, the op is named with the reason, and a fresh process continues with the next. Each answer is
{"at", "sections"}, {"at", "model"}, or {"at", "failed": why} where the op no longer exists, and is on disk before the
next op is called. All functions together have a time limit.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from dsl.convert import structure, unstructure
from dsl.errors import DflowError, StructureError
from dsl.files import append_line, read_json_or_none, read_lines, write_json
from dsl.finding import Finding
from dsl.op_class import hook
from dsl.op_table import load_op, use_draft_folders
from executor.store.manifest import with_own_files
from executor.system.supervisor import Finished, run_module
from executor.system.symlinks import links_in
from ops.lib.logged_model import LoggedModel
from ops.lib.report_sections import Account, Body, Compared, Html, Picture, Section, Table

BODIES: dict[str, type[Body]] = {kind.__name__: kind for kind in (Table, Html, Picture, Account, Finding)}
TIME_S = 20.0  # of one op's function
TOTAL_S = 30.0  # of all; MLflow's report of a run waits a little longer


@frozen
class Part:
    """An artifact to be shown by its op. own: its files outside the digest, by name.

    values: see ops.lib.report_sections.Compared.
    """

    folder: Path
    own: Mapping[str, Path] = field(eq=lambda own: tuple(own.items()))
    values: Mapping[str, str] = field(factory=dict, eq=lambda values: tuple(values.items()))


@frozen
class Request:
    """A request to call an op's hook: "report" or "logged_model" for one artifact, "compare" for several."""

    hook: str
    op: str
    op_files: tuple[Path, ...]
    parts: tuple[Part, ...]

    @property
    def folder(self) -> Path:
        """The folder that picture paths are relative to."""
        return self.parts[0].folder


@frozen
class Shown:
    """The result of an op's hook: the sections of an artifact, or a model. failed: why there is none."""

    sections: Sequence[Section] = ()
    model: LoggedModel | None = None
    failed: str = ""


def shown_by_ops(requests: Sequence[Request]) -> dict[Request, Shown]:
    """The sections that each op shows for its request; empty where the op has no such hook."""
    found: dict[Request, Shown] = {}
    pending = list(dict.fromkeys(requests))
    end = time.monotonic() + TOTAL_S
    while pending:
        seconds_left = end - time.monotonic()
        if seconds_left <= 0:
            found |= dict.fromkeys(pending, Shown(failed=f"all ops together took longer than {TOTAL_S:g} s"))
            break
        answers, failed = _run(pending, seconds_left)
        found |= answers
        pending = [one for one in pending if one not in answers]
        if pending:  # the process ended within the first of them
            found[pending.pop(0)] = Shown(failed=failed)
    return found


def _run(requests: Sequence[Request], within_s: float) -> tuple[dict[Request, Shown], str]:
    """Answer requests in one process. Returns the answers, and why the process ended before it had answered all."""
    with tempfile.TemporaryDirectory() as folder:
        file, answers = Path(folder, "requests.json"), Path(folder, "answers.jsonl")
        write_json(file, unstructure(requests))
        arguments = (str(file), str(answers), str(TIME_S))
        done = run_module("executor.results.op_hooks", *arguments, within_s=within_s)
        lines = read_lines(answers)
    return {requests[line["at"]]: _shown(line, requests[line["at"]].folder) for line in lines}, _why(done)


def _why(done: Finished) -> str:
    if done.code is None:
        return f"all ops together took longer than {TOTAL_S:g} s"
    return f"it took longer than {TIME_S:g} s" if done.code == -signal.SIGALRM else done.reason


def _shown(line: Mapping[str, Any], folder: Path) -> Shown:
    if "failed" in line:
        return Shown(failed=str(line["failed"]))
    if "model" in line:
        try:
            return Shown(model=structure(LoggedModel, line["model"]))
        except StructureError as error:
            return Shown(failed=f"it is invalid: {error}")
    return Shown([section_from_json(section, folder) for section in line["sections"]])


def section_to_json(section: Section, folder: Path) -> dict[str, Any]:
    """A section as JSON; picture paths are relative to the artifact's folder. Raises TypeError for an unknown body, and
    ValueError for a finding without text.
    """
    body = section.body
    kind = type(body).__name__
    if kind not in BODIES:
        raise TypeError(f'section "{section.title}": a body is one of {", ".join(BODIES)}, not {kind}')
    if isinstance(body, Picture):
        path = folder / body.path
        body = attrs.evolve(body, path=path.relative_to(folder) if path.is_relative_to(folder) else path)
    if isinstance(body, Finding) and not body.what:
        raise ValueError(f'section "{section.title}": its finding has no text')
    values = body.to_json() if isinstance(body, Finding) else unstructure(body)
    of_section = {"title": section.title, "note": section.note, "is_timed": section.is_timed}
    return {**of_section, "kind": kind, "body": values}


def section_from_json(data: Mapping[str, Any], folder: Path) -> Section:
    """A section of the report, read from JSON. Values keep their types: an int of an op's table stays an int."""
    values = dict(data["body"])
    if data["kind"] == "Picture":
        values["path"] = folder / values["path"]
    body = Finding.from_json(values) if data["kind"] == Finding.__name__ else BODIES[data["kind"]](**values)
    return Section(data["title"], body, data["note"], data["is_timed"])


def main() -> int:
    requests, answers = structure(tuple[Request, ...], read_json_or_none(Path(sys.argv[1]))), Path(sys.argv[2])
    for at, request in enumerate(requests):
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
        append_line(answers, {"at": at, **_answer(request, answers.with_name(f"view-{at}"))})
    return 0


def _answer(request: Request, view: Path) -> dict[str, Any]:
    """Call the hook of a request; returns what it shows, or why it failed.

    view: a path where a folder with the run's own files is made.
    """
    try:
        use_draft_folders(request.op_files)
        show = hook(load_op(request.op, request.op_files), request.hook)
        if show is None:
            return {"sections": []}
        if link := next((link for part in request.parts for link in links_in(part.folder)), None):
            return {"failed": f"its artifact holds a link, {link.name}; see `dflow doctor --verify`"}
        if request.hook == "logged_model":
            return {"model": unstructure(show(request.folder))}
        views = [view.with_name(f"{view.name}-{place}") for place in range(len(request.parts))]
        folders = [with_own_files(part.own, part.folder, own) for part, own in zip(request.parts, views, strict=True)]
        folder = folders[0]
        if request.hook == "report":
            sections = list(show(folder))
        else:
            sections = list(
                show([Compared(own, part.values) for own, part in zip(folders, request.parts, strict=True)])
            )
    except DflowError as error:
        return {"failed": str(error)}
    for section in sections:
        if not isinstance(section, Section):
            raise TypeError(f"expected a list of ops.lib.report_sections.Section, got {type(section).__name__} in it")
    return {"sections": [section_to_json(section, folder) for section in sections]}


if __name__ == "__main__":
    sys.exit(main())
