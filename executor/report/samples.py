"""What became of the samples, from the source to the training, and whether the counts of the nodes add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from executor.report.markup import Markup, element, joined, table
from executor.report.overview import run_name
from executor.report.run_data import RunFacts
from ops.lib.report_sections import Account


@frozen
class Checked:
    """The account of a node. problem: what does not add up, empty where all does."""

    node: str
    account: Account
    problem: str


def samples(runs: Sequence[RunFacts], accounts: Mapping[str, Mapping[str, Account]]) -> Markup:
    """A table for each run; accounts by run and node. One table where all runs have the same."""
    shown = [(run, checked(run, accounts.get(run.run, {}))) for run in runs]
    if len({repr(rows) for _, rows in shown}) == 1:
        return _table(shown[0][1]) if shown[0][1] else Markup("")
    parts = [joined([element("h3", run_name(run)), _table(rows)]) for run, rows in shown if rows]
    return element("div", *parts, class_="wide-grid")


def checked(run: RunFacts, accounts: Mapping[str, Account]) -> list[Checked]:
    """Each account in the order of the data, compared with itself and with the nearest ones above it."""
    rows = []
    above: dict[str, list[Account]] = {}  # what each node hands on
    for node_id, node in run.nodes.items():
        handed = [account for parent in node.parents for account in above.get(parent, ())]
        own = accounts.get(node_id)
        if own is not None:
            rows.append(Checked(node_id, own, problem_of(own, handed)))
        above[node_id] = handed if own is None else [own]
    return rows


def problem_of(own: Account, handed: Sequence[Account]) -> str:
    """Why the figures of an account are not each other's sum, or not what the nodes above kept."""
    kept, dropped = sum(own.kept.values()), sum(own.dropped.values())
    if own.came_in != kept + dropped:
        return f"{own.came_in} came in, but {kept} kept and {dropped} dropped make {kept + dropped}"
    expected = [
        sum(count for split, count in account.kept.items() if split in (own.splits or account.kept))
        for account in handed
    ]
    if expected and own.came_in not in (*expected, sum(expected)):
        return f"{own.came_in} came in, but the nodes above kept {', '.join(map(str, dict.fromkeys(expected)))}"
    return ""


def _table(rows: Sequence[Checked]) -> Markup:
    splits = list(dict.fromkeys(split for row in rows for split in row.account.kept))
    columns = ["node", "in", "dropped", "kept", *splits, "adds up", "splits read", "dropped for"]
    return table(columns, [_row(row, splits) for row in rows])


def _row(row: Checked, splits: Sequence[str]) -> list[object]:
    account = row.account
    by_count = sorted(account.dropped.items(), key=lambda item: (-item[1], item[0]))
    reasons = joined((element("div", f"{count} {reason}") for reason, count in by_count if count))
    problem = element("span", row.problem, class_="mark bad") if row.problem else "yes"
    return [
        row.node,
        account.came_in,
        sum(account.dropped.values()),
        sum(account.kept.values()),
        *(account.kept.get(split) for split in splits),
        problem,
        ", ".join(account.splits) or "all",
        reasons or None,
    ]
