"""What the ops show of their artifacts, node by node: the runs or combinations side by side, their charts in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from attrs import frozen

from dsl.sections import Account, Body, Chart, Html, Picture, Section, Table
from executor.report.artifacts import Asked, Shown, shown_by_ops
from executor.report.chart import drawn, is_named, together
from executor.report.columns import node_ids, shared
from executor.report.compared import compared
from executor.report.embedded import Embedded
from executor.report.facts import NodeFacts, RunFacts
from executor.report.markup import Markup, element, html, joined, limited, paragraph, table
from executor.report.overview import run_name

ShownByOps = Mapping[tuple[str, str], Shown]  # by run and node


@frozen
class Piece:
    """A section of a node of a run."""

    run: RunFacts
    node: NodeFacts
    section: Section


def asked_of(runs: Sequence[RunFacts]) -> ShownByOps:
    """What the op of each node shows of its artifact, where there is one."""
    asked = {
        (run.run, node.id): Asked(node.op, tuple(run.op_files), node.folder)
        for run in runs
        for node in run.nodes.values()
        if node.folder is not None and node.op
    }
    shown = shown_by_ops(list(asked.values()))
    return {where: shown[one] for where, one in asked.items()}


def accounts_of(shown: ShownByOps) -> dict[str, dict[str, Account]]:
    """The accounts of samples alone, by run and node."""
    found: dict[str, dict[str, Account]] = {}
    for (run, node_id), one in shown.items():
        for section in one.sections:
            if isinstance(section.body, Account):
                found.setdefault(run, {})[node_id] = section.body
    return found


def node_sections(columns: Sequence[RunFacts], shown: ShownByOps, embedded: Embedded) -> Markup:
    """Node by node, in the order of the data, then the pictures that the node drew while it ran."""

    def of_node(node_id: str) -> Markup:
        there = shared(columns, node_id)
        parts = [*_of_op(there, shown, embedded), *_figures(there, embedded)]
        return element("div", *parts, class_="parts") if parts else Markup("")

    return limited(node_ids(columns), of_node)


def _of_op(there: Sequence[tuple[RunFacts, NodeFacts]], shown: ShownByOps, embedded: Embedded) -> list[Markup]:
    parts: list[Markup] = []
    pieces: dict[str, list[Piece]] = {}
    for run, node in there:
        one = shown.get((run.run, node.id), Shown())
        if one.failed:
            sentence = f"What the op {node.op} shows of its artifact is missing here: {one.failed}"
            parts.append(paragraph(element("span", sentence, class_="mark bad"), class_="full"))
        for section in one.sections:
            if not isinstance(section.body, Account):
                pieces.setdefault(section.title, []).append(Piece(run, node, section))
    return parts + [_titled(title, of_title, len(there) == 1, embedded) for title, of_title in pieces.items()]


def _titled(title: str, pieces: Sequence[Piece], is_one: bool, embedded: Embedded) -> Markup:
    """All runs' sections of that title: in one chart or table where they are alike, else beside each other."""
    head, notes = element("h4", title), _notes(pieces, is_one)
    runs = [piece.run for piece in pieces]
    charts = [body for piece in pieces if isinstance(body := piece.section.body, Chart)]
    if len(charts) == len(pieces) and len({(chart.kind, is_named(chart)) for chart in charts}) == 1:
        several = [(run.label, run.place, chart) for run, chart in zip(runs, charts, strict=True)]
        return element("div", head, drawn(*together(several)), *notes)
    tables = [body for piece in pieces if is_facts(body := piece.section.body)]
    facts = [{str(name): value for name, value in body.rows} for body in tables]
    if len(facts) == len(pieces) > 1:
        return element("div", head, compared(runs, facts, ""), *notes)
    names = [Markup("") if is_one else paragraph(run_name(run)) for run in runs]
    cells = [element("div", name, _body(piece, embedded)) for name, piece in zip(names, pieces, strict=True)]
    is_wide = len(cells) > 1 or isinstance(pieces[0].section.body, Html)
    grid = element("div", *cells, class_="wide-grid")
    return element("div", head, grid, *notes, class_="full" if is_wide else None)


def _notes(pieces: Sequence[Piece], is_one: bool) -> list[Markup]:
    """Each note once; where runs have other ones, with the run."""
    noted = [piece for piece in pieces if piece.section.note]
    is_same = is_one or len({piece.section.note for piece in pieces}) == 1
    shown = noted[:1] if is_same else noted
    return [
        paragraph("" if is_same else joined([run_name(piece.run), " "]), piece.section.note, class_="faint")
        for piece in shown
    ]


def is_facts(body: Body) -> TypeGuard[Table]:
    """Whether a table is one of names and values."""
    return isinstance(body, Table) and list(body.columns) == ["", ""]


def _body(piece: Piece, embedded: Embedded) -> Markup:
    body = piece.section.body
    if isinstance(body, Table):
        return table(body.columns, body.rows)
    if isinstance(body, Chart):
        return drawn(body)
    if isinstance(body, Picture):
        return embedded.picture(body.path, body.alt)
    assert isinstance(body, Html) and piece.node.folder is not None
    return embedded.page(body.text, body.height, f"{piece.node.id}: {piece.section.title}", piece.node.folder)


def _figures(there: Sequence[tuple[RunFacts, NodeFacts]], embedded: Embedded) -> list[Markup]:
    """The pictures by name; each of an artifact that runs share once."""
    cells = [
        element(
            "figure",
            embedded.picture(path, f"{node.id}: {name}"),
            element("figcaption", run_name(run), html(f" {name}")),
        )
        for run, node in there
        for name, path in node.figures.items()
    ]
    return [element("div", *cells, class_="grid full")] if cells else []
