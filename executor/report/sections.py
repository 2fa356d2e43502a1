"""What the ops show of their artifacts, node by node: the runs or combinations side by side, their charts in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import attrs
from attrs import frozen

from executor.report.chart import drawn, is_named, together
from executor.report.columns import named, node_ids, shared
from executor.report.compared import compared
from executor.report.embedded import Embedded
from executor.report.markup import Markup, element, html, joined, limited, paragraph, table
from executor.report.op_sections import Asked, Shown, shown_by_ops
from executor.report.overview import run_name
from executor.report.run_data import NodeFacts, RunFacts
from ops.lib.report_sections import Account, Body, Chart, Html, Picture, Section, Table

MOST_NARROW = 4  # columns of a table that a third of the page holds
LONG_TEXT = 30

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
        (run.run, node.id): Asked(node.op, tuple(run.op_files), node.folder, tuple(node.own.items()))
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
        parts = [*_of_op(columns, node_id, shown, embedded), *_figures(shared(columns, node_id), embedded)]
        return element("div", *parts, class_="parts") if parts else Markup("")

    return limited(node_ids(columns), of_node)


def _of_op(columns: Sequence[RunFacts], node_id: str, shown: ShownByOps, embedded: Embedded) -> list[Markup]:
    """What runs show of the same artifact is there once where it is the same: what they measured need not be."""
    failed: dict[str, None] = {}
    pieces: dict[str, dict[object, list[Piece]]] = {}
    for run in columns:
        node = run.nodes.get(node_id)
        if node is None:
            continue
        one = shown.get((run.run, node.id), Shown())
        if one.failed:
            failed[f"What the op {node.op} shows of its artifact is missing here: {one.failed}"] = None
        for section in one.sections:
            if not isinstance(section.body, Account):
                same = node.recorded.digest, repr(section)
                pieces.setdefault(section.title, {}).setdefault(same, []).append(Piece(run, node, section))
    parts = [paragraph(element("span", sentence, class_="mark bad"), class_="full") for sentence in failed]
    for title, of_title in pieces.items():
        merged = [attrs.evolve(same[0], run=named([piece.run for piece in same])) for same in of_title.values()]
        parts.append(_titled(title, merged, len(columns) == 1, embedded))
    return parts


def _titled(title: str, pieces: Sequence[Piece], is_one: bool, embedded: Embedded) -> Markup:
    """All runs' sections of that title: in one chart or table where they are alike, else beside each other."""
    is_shared = len(pieces) == 1 and not is_one
    name = paragraph(run_name(pieces[0].run)) if is_shared else Markup("")
    head, notes = joined([element("h4", title), name]), _notes(pieces, is_one)
    runs = [piece.run for piece in pieces]
    charts = [body for piece in pieces if isinstance(body := piece.section.body, Chart)]
    if len(charts) == len(pieces) and len({(chart.kind, is_named(chart)) for chart in charts}) == 1:
        several = [(run.label, run.place, chart) for run, chart in zip(runs, charts, strict=True)]
        return element("div", head, drawn(*together(several)), *notes)
    tables = [body for piece in pieces if is_facts(body := piece.section.body)]
    facts = [{str(name): value for name, value in body.rows} for body in tables]
    if len(facts) == len(pieces) > 1:
        return element("div", head, compared(runs, facts, ""), *notes)
    names = [Markup("") if len(runs) == 1 else paragraph(run_name(run)) for run in runs]
    cells = [element("div", name, _body(piece, embedded)) for name, piece in zip(names, pieces, strict=True)]
    is_wide = len(cells) > 1 or needs_width(pieces[0].section.body)
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


def needs_width(body: Body) -> bool:
    """Whether a third of the page is too little: for pages, and for tables of many columns or with whole texts."""
    if isinstance(body, Table):
        return len(body.columns) > MOST_NARROW or any(
            isinstance(cell, str) and len(cell) > LONG_TEXT for row in body.rows for cell in row
        )
    return isinstance(body, Html)


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
