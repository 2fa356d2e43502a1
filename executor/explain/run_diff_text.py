"""The comparison of two runs as a user reads it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from executor.explain.run_diff import MetricPair, NodeDiff, RunsDiff
from executor.keys.code_diff import code_text
from executor.keys.differences import difference_text
from executor.records.run_record import Record
from executor.system.output import columns, counted, moment, shown_digest

WIDTH = 100
MOST_COMBINATIONS = 16


def runs_text(first: Record, second: Record, found: RunsDiff) -> str:
    """The two runs; a table of the nodes, what differs in each of them, and the metrics that differ.

    The same for the copies of each of the first combinations, where one of them is a sweep.
    """
    runs = [("first", first), ("second", second)]
    heads = [
        (word, record.run, record.state.pipeline, moment(record.state.started), record.status())
        for word, record in runs
    ]
    blocks = [columns(heads[0], heads[1:])]
    if not found.combinations:
        return "\n\n".join([*blocks, *_compared(found.nodes, "Every node")])
    blocks.append(_swept(found))
    if found.nodes:
        blocks += _compared(found.nodes, "Every node that is not swept")
    for combination in found.combinations[:MOST_COMBINATIONS]:
        name = ", ".join(f"{group}={value}" for group, value in combination.values.items())
        blocks += [f"--- {name} ---", *_compared(combination.nodes, "Every node of this combination")]
    left = len(found.combinations) - MOST_COMBINATIONS
    return "\n\n".join([*blocks, *([f"and {left} more combinations: dflow diff --json"] if left > 0 else [])])


def _swept(found: RunsDiff) -> str:
    """How many combinations, and of which values."""
    other = "first" if found.swept == "second" else "second"
    values: dict[str, dict[str, None]] = {}
    for combination in found.combinations:
        for group, value in combination.values.items():
            values.setdefault(group, {})[value] = None
    lines = "\n".join(f"  {group}: {', '.join(each)}" for group, each in values.items())
    count = counted(len(found.combinations), "combination")
    head = f"The {found.swept} is a sweep of {count}; each copy of a node is compared with that node of the {other}:"
    return f"{head}\n{lines}"


def _compared(nodes: Sequence[NodeDiff], every: str) -> list[str]:
    blocks = []
    if all(node.is_same for node in nodes):
        blocks.append(f"{every} has the same key parts, settings and artifact in both.")
    else:
        blocks.append(columns(("node", "first", "second", ""), list(map(_row, nodes))))
        blocks += ["\n".join(lines) for node in nodes if len(lines := _details(node)) > 1]
    pairs = [(node.node, pair) for node in nodes for pair in node.metrics if not pair.is_same]
    rows = [(node, pair.name, _number(pair.first), _number(pair.second), _difference(pair)) for node, pair in pairs]
    if rows:
        blocks.append(columns(("node", "metric", "first", "second", "difference"), rows))
    same = sum(pair.is_same for node in nodes for pair in node.metrics)
    if same:
        blocks.append(f"{same} final metrics are the same in both.")
    return blocks


def _row(node: NodeDiff) -> tuple[str, ...]:
    return (node.node, *(shown_digest(digest) or "-" for digest in node.digests), node.status)


def _details(node: NodeDiff) -> list[str]:
    if node.where != "both":
        return [f"{node.node}:", *_config(node)]
    lines = [f"  {difference_text(node.node, each)}" for each in node.values]
    for line in code_text(node.code, lambda module: module):
        lines.append(f"  {line}" if line.startswith(" ") else f"  code changed: {line}")
    lines += [f"  input changed: {parent} is another artifact" for parent in node.inputs]
    if node.unknown:
        gone = " and the ".join(node.unknown)
        lines.append(f"  code and libraries: not compared, their record is gone for the {gone}")
    return [f"{node.node}:", *lines]


def _config(node: NodeDiff) -> list[str]:
    """The values of a node that only one run has, several in a line; None is left out."""
    values = [(change.name, change.new if node.where == "second" else change.old) for change in node.values]
    text = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values if value is not None)
    head = f"  {node.status}: "
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent="    ", break_long_words=False)


def _difference(pair: MetricPair) -> str:
    if pair.difference is None:
        return ""
    share = f" ({pair.difference / abs(pair.first):+.2%})" if pair.first else ""
    return f"{pair.difference:+.4g}{share}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
