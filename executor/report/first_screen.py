"""The first screen: is the trained target better, is the draft good and safe to serve, what limits it, what to do next.

Ops answer by the verdicts in their sections. What no node answered, though the pipeline makes a draft, is reported as
not measured, with the op that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from attrs import evolve, frozen
from markupsafe import Markup

from dsl.errors import DflowError, shortened
from dsl.finding import Finding, for_run
from dsl.op_class import Question
from dsl.op_table import load_op, op_names
from executor.model_tools.measure import kept
from executor.records.run_record import GOES_ON, Record
from executor.report.artifacts import ShownByOps, sections_of
from executor.report.run_data import NodeFacts, RunFacts, columns_of, read_runs
from executor.report.templates import joined, render
from executor.results.op_hooks import Shown
from executor.results.run_table import first_line
from executor.store.artifact_store import Store
from ops.lib.report_sections import Section, verdict
from ops.tools.diagnose.judgement import CAUSE

QUESTIONS: Mapping[str, str] = {
    "target": "Is the trained target better?",
    "good": "Is the draft good?",
    "safe": "Is it safe to serve?",
    "limit": "What limits it?",
}
IMPORTED = {"train_dflash": "load_draft"}  # op -> another whose presence explains that it is not there
MOST_OPEN = 2  # of runs or combinations; the answers of the others are folded
MOST_NAMED = 3  # nodes that ran beside a measured time
MOST_TEXT = 160  # characters of a warning, which Warnings and errors has whole
NO_NODE = "not measured: the pipeline has no node of"
WORST_FIRST = ("fatal", "error", "warning", "unknown", "info", "good")


@frozen
class Line:
    """A verdict in the report. title: what was judged. node: the node that it concerns, or ""."""

    node: str
    title: str
    verdict: Finding


Advised = Callable[[str, str, Finding], Finding]


def by_field(node: str, _title: str, found: Finding) -> Finding:
    """A node's verdict, with the node's field that its advice concerns."""
    return evolve(found, advice=f"{found.advice} ({found.path} of {node})") if found.path else found


def answers(columns: Sequence[RunFacts], shown: ShownByOps) -> Markup:
    """The answers to the report's questions for each run or combination, as HTML; empty if no op answers any."""
    found = [(column, lines) for column in columns if (lines := lines_of(column, shown))]
    is_one_run = len({column.run for column in columns}) == 1  # whose page has its warnings too
    parts = []
    for column, lines in found:
        of_question = [(text, _in_order(lines, question)) for question, text in QUESTIONS.items()]
        warnings = sum(len(node.recorded.warnings) for node in column.nodes.values()) if is_one_run else 0
        parts.append((column.label, render("answered", of_question, next_steps(column, lines), warnings)))
    if len(columns) == 1:
        return joined(content for _, content in parts)
    folded = [render("folded", label, content) for label, content in parts[MOST_OPEN:]]
    return joined([render("side_by_side", parts[:MOST_OPEN]), *folded]) if parts else Markup("")


def in_short(store: Store, record: Record, advised: Advised = by_field) -> Iterator[str]:
    """The report's first screen as text for a terminal: a line for each question, its verdicts, and what to do next.

    advised: see `lines_of`.
    """
    runs = read_runs(store, [record])
    shown, _ = sections_of(runs)
    for column in columns_of(runs):
        lines = lines_of(column, shown, advised)
        for question, text in QUESTIONS.items():
            asked = [line for line in lines if line.verdict.code == question]
            if asked:
                yield text
            for line in asked:
                yield f"  {line.verdict.level}: {line.title}: {line.verdict.what}"
        steps = next_steps(column, lines) if lines else []
        yield from (f"next: {step}" for step in steps)


def lines_of(column: RunFacts, shown: ShownByOps, advised: Advised = by_field) -> list[Line]:
    """The verdicts of a run in the order of the data, including things not measured; `dflow diagnose` comes last.

    advised: maps a node ("" for an op that the pipeline lacks), a title and a verdict to a verdict with concrete
    advice.
    """
    lines: list[Line] = []
    for name, node in column.nodes.items():
        of_node = shown.get((column.run, node.id), Shown())
        given = [
            Line(name, section.title, _with_company(section, section.body, node))
            for section in of_node.sections
            if isinstance(section.body, Finding)
        ]
        lines += given
        known = {line.verdict.code for line in given}
        asked = _answered_by(node.op, tuple(column.op_files or ()))
        for question in asked:
            if question not in known:
                lines.append(Line(name, "not measured", _unknown(question, column, node, of_node.failed)))
        for code in [line.verdict.code for line in given[:1]] or asked[:1]:
            said = tuple(line.verdict.what for line in given)  # a node warns of what its verdict says again
            others = [text for text in node.recorded.warnings if not text.startswith(said)]
            texts = [_without_middle(for_run(text, column.run)) for text in others]
            lines += [Line(name, "warning", Finding(text, level="warning", code=code)) for text in texts]
    if _of_draft(lines):
        lines += [*_unasked(column), *_diagnosed(column)]
    return [evolve(line, verdict=advised(line.node, line.title, line.verdict)) for line in lines]


def _of_draft(lines: Sequence[Line]) -> bool:
    """Whether any verdict concerns a draft; a pipeline may only train a target."""
    return any(line.verdict.code != "target" for line in lines)


def _with_company(section: Section, found: Finding, node: NodeFacts) -> Finding:
    """The verdict of a section; if it is a measured time, with nodes that ran at the same time."""
    if not section.is_timed or not node.beside:
        return found
    more = f" and {len(node.beside) - MOST_NAMED} more" if len(node.beside) > MOST_NAMED else ""
    return evolve(found, what=f"{found.what}; measured beside {', '.join(node.beside[:MOST_NAMED])}{more}")


def _without_middle(text: str) -> str:
    """The text without its middle, if it is longer than MOST_TEXT."""
    if len(text) <= MOST_TEXT:
        return text
    head, _, _ = text[: MOST_TEXT // 2].rpartition(" ")
    _, _, tail = text[-MOST_TEXT // 2 :].partition(" ")
    return f"{head} ... {tail}" if head and tail else shortened(text, MOST_TEXT)


def _in_order(lines: Sequence[Line], question: str) -> list[Line]:
    """The lines of a question in the order of the data; for what limits a draft, the worst first."""
    chosen = [line for line in lines if line.verdict.code == question]
    return sorted(chosen, key=_badness) if question == "limit" else chosen


def _badness(line: Line) -> int:
    return WORST_FIRST.index(line.verdict.level)


@cache
def _answered_by(op: str, op_files: tuple[Path, ...]) -> tuple[Question, ...]:
    """The questions that an op answers; none for an op that no longer exists."""
    with suppress(DflowError):
        return load_op(op, op_files).answers
    return ()


def _unknown(question: Question, column: RunFacts, node: NodeFacts, failed: str) -> Finding:
    """A finding on why a node has not answered a question."""
    resume = f"dflow resume {column.run}"
    if node.state == "failed":
        text = f"it failed: {first_line(node.failure.what)}"
        how = f" ({node.failure.advice})" if node.failure.advice else ""
        return verdict(question, text, "error", f"correct what made {node.id} fail{how}; then {resume}")
    if node.is_gone:
        return verdict(question, "the store no longer holds its artifact", "warning", f"make it again: {resume}")
    if failed:
        return verdict(question, f"its sections are missing: {failed}", "warning")
    if node.state == "done":
        return verdict(question, "its report has no verdict on this", "warning")
    if column.status == "running":
        return verdict(question, "it has not finished yet")
    return verdict(question, node.recorded.reason or "it has not finished", "warning", f"finish the run: {resume}")


def _unasked(column: RunFacts) -> Iterator[Line]:
    """Lines for questions that no node of the pipeline answers although a built-in op could; none without
    built-in ops.
    """
    present = {node.op for node in column.nodes.values()}
    built_in = {op: questions for op in op_names() if (questions := _answered_by(op, ()))}
    for op, questions in built_in.items() if present & built_in.keys() else ():
        if op not in present and IMPORTED.get(op) not in present:
            for question in questions:
                does = first_line(load_op(op).help).rstrip(".")
                advice = f'add a node with op = "{op}": {does[:1].lower()}{does[1:]}'
                yield Line("", op, verdict(question, f"{NO_NODE} {op}", "warning", advice))


def _diagnosed(column: RunFacts) -> Iterator[Line]:
    names = {node.id: name for name, node in column.nodes.items()}
    found = {names[node]: result.findings for node, result in kept(column.record).items() if node in names}
    if not found and column.status == "done":
        advice = f"measure the usual causes of a low tau: dflow diagnose {column.run}"
        yield Line("", "diagnosis", verdict("limit", "not measured: the usual causes of a low tau", "info", advice))
    for name, findings in found.items():
        causes = [finding for finding in findings if finding.level == CAUSE]
        for cause in causes:
            text, advice = cause.what.replace("\n", "; "), f"{cause.code}: {cause.advice}"
            yield Line(name, cause.code, verdict("limit", text, "error", advice))
        if not causes:
            yield Line(name, "diagnosis", verdict("limit", "none of the usual causes of a low tau was found", "good"))


def next_steps(column: RunFacts, lines: Sequence[Line]) -> list[str]:
    """List the advice, each once, that of the worst verdicts first, of those by their question.

    A draft of a run that is done, about which nothing is open, is to be served; a run that goes on is waited for.
    """
    by_question = sorted(lines, key=lambda line: list(QUESTIONS).index(line.verdict.code))
    advice = [line.verdict.advice for line in sorted(by_question, key=_badness) if line.verdict.advice]
    steps = list(dict.fromkeys(for_run(text, column.run) for text in advice))
    if not _of_draft(lines):
        return steps
    open_ = [
        line for line in lines if line.verdict.code in ("good", "safe") and line.verdict.level in ("error", "warning")
    ]
    if column.status == "running":
        return [GOES_ON, *steps]
    return steps if open_ or column.status != "done" else [f"serve it: dflow serve {column.run}", *steps]
