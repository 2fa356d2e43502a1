"""What the ops show of their artifacts, node by node; the pictures that they drew while they ran; and the account of
samples.

Pictures and pages of artifacts are embedded up to a limit; larger ones are named by their paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import define, evolve, frozen
from markupsafe import Markup

from dsl.finding import Finding
from dsl.op_table import op_names
from dsl.shown import shown_bytes
from executor.report.run_data import RunFacts
from executor.report.templates import embedded_file, faint, limited, mark, render, table
from executor.results.op_hooks import Part, Request, Shown, shown_by_ops
from ops.lib.report_sections import Account, Body, Html, Picture, Section, Table

PICTURE_MOST = 1_000_000  # bytes of a file
PAGE_MOST = 2_000_000
TOTAL_MOST = 16_000_000  # of all together: a phone can open it
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}
MOST_NARROW = 4  # columns of a table that a third of the page holds
LONG_TEXT = 30

ShownByOps = Mapping[tuple[str, str], Shown]  # by run and node


@define
class Embedded:
    """A counter of the bytes embedded in the page so far."""

    used: int = 0

    def picture(self, path: Path, alt: str) -> Markup:
        kind = KINDS.get(path.suffix.lower())
        if kind is None:
            return faint(f"{alt}: {path} is not a picture of a supported kind ({', '.join(KINDS)})")
        try:
            size = path.stat().st_size
            if not self._takes(size, PICTURE_MOST):
                return faint(f"{alt}: {shown_bytes(size)}, too large to be shown here: {path}")
            content = path.read_bytes()
        except OSError as error:
            return faint(f"{alt}: {path} cannot be read ({error.strerror})")
        return embedded_file(kind, content, alt)

    def page(self, text: str, height: int, title: str, folder: Path | None) -> Markup:
        if not self._takes(len(text.encode(errors="replace")), PAGE_MOST):
            where = f"; it is in {folder}" if folder is not None else ""
            return faint(f"{title}: {shown_bytes(len(text))}, too large to be shown here{where}")
        return render("frame", text, title, height)

    def _takes(self, size: int, most: int) -> bool:
        if size > most or self.used + size > TOTAL_MOST:
            return False
        self.used += size
        return True


def sections_of(runs: Sequence[RunFacts], *, compared: bool = False) -> tuple[ShownByOps, Mapping[str, Shown]]:
    """The sections that each node's op shows of its artifact, by run and node.

    compared: also what ops show of several artifacts, of combinations or of runs, by the node's name in the file.
    """
    requests = _requests(runs)
    comparisons = _comparisons(runs, requests) if compared else {}
    shown = shown_by_ops([*requests.values(), *comparisons.values()])
    return (
        {where: shown[request] for where, request in requests.items()},
        {name: shown[request] for name, request in comparisons.items()},
    )


def _requests(runs: Sequence[RunFacts]) -> dict[tuple[str, str], Request]:
    built_in = op_names()
    return {
        (run.run, node.id): Request("report", node.op, tuple(run.op_files or ()), (Part(node.folder, node.own),))
        for run in runs
        for node in run.nodes.values()
        if node.folder is not None and node.op and (run.op_files is not None or node.op in built_in)
    }


def _comparisons(runs: Sequence[RunFacts], requests: Mapping[tuple[str, str], Request]) -> dict[str, Request]:
    """Requests for comparisons, for each node with several artifacts of one op, in the order of the file."""
    found: dict[str, list[tuple[Request, Mapping[str, str]]]] = {}
    for run in runs:
        chosen = _values_of_copies(run)
        for node in run.nodes.values():
            if (run.run, node.id) in requests:
                values = {**chosen.get(node.id, {}), **({"run": run.label} if len(runs) > 1 else {})}
                found.setdefault(node.template or node.id, []).append((requests[run.run, node.id], values))
    several = {}
    for name, of_node in found.items():
        first, _ = of_node[0]
        is_one_op = len({(one.op, one.op_files) for one, _ in of_node}) == 1
        if is_one_op and len({one.folder for one, _ in of_node}) > 1:
            parts = tuple(evolve(one.parts[0], values=values) for one, values in of_node)
            several[name] = evolve(first, hook="compare", parts=parts)
    return several


def _values_of_copies(run: RunFacts) -> dict[str, Mapping[str, str]]:
    """The variant chosen in each group for every copied node of a run, by the copy's id."""
    return {
        node.id: {group: row.combination.values[group] for group in node.copy.values}
        for row in run.combinations
        for node in row.combination.nodes
        if node.copy is not None
    }


def compared_sections(shown: Mapping[str, Shown], embedded: Embedded) -> Markup:
    """The sections in which ops compare several artifacts, node by node in the order of the data, as HTML."""

    def of_node(name: str) -> Markup:
        one = shown[name]
        failed = f"The comparison of {name} is missing here: {one.failed}" if one.failed else ""
        return _node(failed, _sections(one.sections, embedded, name), [])

    return limited(list(shown), of_node)


def node_sections(run: RunFacts, shown: ShownByOps, embedded: Embedded) -> Markup:
    """The sections of each node in the order of the data, followed by the figures that the node drew while it ran.

    Accounts and verdicts are left out; the page shows them elsewhere.
    """

    def of_node(node_id: str) -> Markup:
        node, one = run.nodes[node_id], shown.get((run.run, node_id), Shown())
        failed = f"The sections of op {node.op} are missing here: {one.failed}" if one.failed else ""
        own = [section for section in one.sections if not isinstance(section.body, (Account, Finding))]
        sections = _sections(own, embedded, node_id, node.folder)
        pictures = [(name, embedded.picture(path, f"{node_id}: {name}")) for name, path in node.figures.items()]
        return _node(failed, sections, pictures)

    return limited(list(run.nodes), of_node)


def _node(failed: str, sections: Sequence[Markup], pictures: Sequence[tuple[str, Markup]]) -> Markup:
    return render("node", failed, sections, pictures) if failed or sections or pictures else Markup("")


def _sections(sections: Sequence[Section], embedded: Embedded, name: str, folder: Path | None = None) -> list[Markup]:
    """The sections of an artifact as HTML. folder: where the artifact is."""
    return [
        render(
            "section",
            section.title,
            _body(section.body, embedded, f"{name}: {section.title}", folder),
            section.note,
            needs_width(section.body),
        )
        for section in sections
    ]


def needs_width(body: Body) -> bool:
    """Whether a section is too wide for a third of the page: pages, and tables with many columns or long texts."""
    if isinstance(body, Table):
        return len(body.columns) > MOST_NARROW or any(
            isinstance(cell, str) and len(cell) > LONG_TEXT for row in body.rows for cell in row
        )
    return isinstance(body, Html)


def _body(body: Body, embedded: Embedded, title: str, folder: Path | None) -> Markup:
    if isinstance(body, Table):
        return table(body.columns, body.rows)
    if isinstance(body, Picture):
        return embedded.picture(body.path, body.alt)
    if isinstance(body, Html):
        return embedded.page(body.text, body.height, title, folder)
    return faint(f"{title}: an account or a verdict is of one artifact")


def accounts_of(run: RunFacts, shown: ShownByOps) -> dict[str, Account]:
    """The accounts of samples, by node."""
    return {
        node_id: section.body
        for (of_run, node_id), one in shown.items()
        for section in one.sections
        if of_run == run.run and isinstance(section.body, Account)
    }


@frozen
class Checked:
    """The checked account of a node. problem: which numbers do not add up, "" for none."""

    node: str
    account: Account
    problem: str


def samples(run: RunFacts, accounts: Mapping[str, Account]) -> Markup:
    """A table of sample counts with a row for each node that counts samples; empty without any."""
    rows = checked(run, accounts)
    if not rows:
        return Markup("")
    splits = list(dict.fromkeys(split for row in rows for split in row.account.kept))
    columns = ["node", "in", "dropped", "kept", *splits, "adds up", "splits read", "dropped for"]
    return table(columns, [_account_row(row, splits) for row in rows])


def checked(run: RunFacts, accounts: Mapping[str, Account]) -> list[Checked]:
    """The accounts of the nodes in the order of the data, each checked in itself and against the nearest
    ones above it.
    """
    rows = []
    above: dict[str, list[Account]] = {}  # what each node passes on
    for node_id, node in run.nodes.items():
        handed = [account for parent in node.parents for account in above.get(parent, ())]
        own = accounts.get(node_id)
        if own is not None:
            rows.append(Checked(node_id, own, problem_of(own, handed)))
        above[node_id] = handed if own is None else [own]
    return rows


def problem_of(own: Account, handed: Sequence[Account]) -> str:
    """A text on why an account's numbers do not add up, or differ from what the nodes above kept; "" if they fit."""
    dropped = sum(own.dropped.values())
    kept = sum(own.kept.values()) if own.conversations is None else own.conversations
    if own.came_in != kept + dropped:
        return f"{own.came_in} came in, but {kept} kept and {dropped} dropped make {kept + dropped}"
    expected = [
        sum(count for split, count in account.kept.items() if split in (own.splits or account.kept))
        for account in handed
    ]
    if expected and own.came_in not in (*expected, sum(expected)):
        return f"{own.came_in} came in, but the nodes above kept {', '.join(map(str, dict.fromkeys(expected)))}"
    return ""


def _account_row(row: Checked, splits: Sequence[str]) -> list[object]:
    account = row.account
    by_count = sorted(account.dropped.items(), key=lambda item: (-item[1], item[0]))
    reasons = render("reasons", [(reason, count) for reason, count in by_count if count])
    return [
        row.node,
        account.came_in,
        sum(account.dropped.values()),
        sum(account.kept.values()),
        *(account.kept.get(split) for split in splits),
        mark(row.problem, "bad") if row.problem else "yes",
        ", ".join(account.splits) or "all",
        reasons or None,
    ]
