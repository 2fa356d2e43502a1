"""How a run stands, as a user reads it: what its running nodes have reported; at its end its nodes, the final metrics
of the last ones, and what they warned of.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from attrs import define, field

from dsl.finding import block, for_run
from dsl.graph import Graph
from executor.records.events import Event, Metric, Progress
from executor.records.run_record import NodeState, RunState
from executor.system.output import columns, print_lines, shown_digest, shown_duration
from ops.lib.report_sections import NOT_KNOWN, SPEEDUP, is_known

NODE_COLUMNS = ("node", "state", "cache", "seconds", "digest")
# What the built-in ops are judged by, where the ops of a run are not loaded.
JUDGED = frozenset({"eval/tau"})
METRICS_SHOWN = 4
ROWS_SHOWN = 40
MOST_COLUMNS = 5  # of copies in a table of results


def print_results(
    state: RunState, result_nodes: Sequence[str], graph: Graph | None = None, warned: Collection[str] = ()
) -> None:
    """Print the table of all nodes, then the metrics of the named nodes, and all warnings.

    warned: the warnings that this command has printed already; of those only the first sentence is repeated.
    """
    print_lines(nodes_text(state))
    print_figures(state, result_nodes, graph, warned)


def nodes_text(state: RunState) -> str:
    """The nodes as a table: state, cache, seconds, digest, and a last column that explains the row.

    That is the error, the reason for the run, or the source run. A long pipeline's cached nodes are only counted.
    """
    names = list(state.nodes)
    if len(names) > ROWS_SHOWN:
        names = [node_id for node_id, node in state.nodes.items() if node.state != "done" or node.cache != "hit"]
    rows = [(*node_cells(node_id, state.nodes[node_id]), _why(state.nodes[node_id])) for node_id in names]
    lines = [
        f"{state.pipeline}, run {state.run}",
        *columns((*NODE_COLUMNS, "why"), rows, right=("seconds",)).splitlines(),
    ]
    if len(names) < len(state.nodes):
        lines.append(f"and {len(state.nodes) - len(names)} cached nodes")
    return "\n".join(lines)


def node_cells(node_id: str, node: NodeState) -> tuple[str, ...]:
    """The row of a node in a table with NODE_COLUMNS."""
    return (node_id, node.state, node.cache or "", shown_seconds(node), shown_digest(node.digest))


def _why(node: NodeState) -> str:
    why = first_line(node.error) if node.error else node.reason
    return f"from run {node.source_run}" if not why and node.cache == "hit" and node.source_run else why


def first_line(text: str) -> str:
    """The first line of a text, with an ellipsis if there are more."""
    first, *more = text.splitlines() or [""]
    return f"{first} ..." if more else first


def failures_text(state: RunState) -> str:
    """The failure of each failed node, with advice; empty where none failed."""
    failed = [node.failure for node in state.nodes.values() if node.state == "failed" and node.failure is not None]
    return "\n".join(block(failure, state.run) for failure in failed)


def print_figures(
    state: RunState, result_nodes: Sequence[str], graph: Graph | None = None, warned: Collection[str] = ()
) -> None:
    """Print the final metrics of the finished ones of these nodes, then the warnings of all finished nodes.

    Copies of a node share a table, and the metrics that judge the result come in the first. A warning is printed once,
    with the names of its nodes. graph: if given, copies are shown as combinations of the sweep. warned: as of
    `print_results`.
    """
    copies_in_sweep = frozenset({node.id for node in graph.nodes.values() if node.copy} if graph is not None else ())
    judged = frozenset(state.judged_by) or JUDGED
    done = {node_id: state.nodes[node_id] for node_id in result_nodes if state.nodes[node_id].state == "done"}
    tables: dict[tuple[str, ...], dict[str, list[tuple[str, str, str]]]] = {}
    for node_id, node in done.items():
        if node.metrics and node_id not in copies_in_sweep:
            rows = result_rows(node.metrics, judged)
            alike = (_without_variant(node_id), *(name for name, _, _ in rows))
            tables.setdefault(alike, {})[node_id] = rows
    for copies in sorted(tables.values(), key=lambda copies: not _is_judged(copies, judged)):
        print_lines(figures_text(copies))
    if graph is not None and copies_in_sweep:
        from executor.results.sweep import sweep_table

        print_lines(sweep_table(graph, state.nodes))
    _print_warnings(state, warned)


def _print_warnings(state: RunState, warned: Collection[str]) -> None:
    of_nodes: dict[str, list[str]] = {}
    for node_id, node in state.nodes.items():
        for warning in dict.fromkeys(node.warnings) if node.state == "done" else ():
            of_nodes.setdefault(warning, []).append(node_id)
    for warning, node_ids in of_nodes.items():
        first, _, more = for_run(warning, state.run).partition(". ")
        shown = f"{first} (the rest of it stands above)" if more and warning in warned else for_run(warning, state.run)
        print_lines(f"{', '.join(node_ids)}: warning: {shown}")


def figures_text(copies: Mapping[str, Sequence[tuple[str, str, str]]]) -> str:
    """The metrics of one node as a table, or of several copies with the same metrics.

    Each copy is a column, or a row if there are many. copies: node id -> its rows, see `result_rows`.
    """
    (first, rows), *others = copies.items()
    if not others:
        table = columns(("metric", "value", "interval"), rows, right=("value",))
        return f"results of {first}\n{table}"
    base = _without_variant(first)
    cells = {
        node_id.removeprefix(f"{base}-"): [f"{value} {interval}".rstrip() for _, value, interval in own]
        for node_id, own in copies.items()
    }
    metrics = [name for name, _, _ in rows]
    if len(cells) > MOST_COLUMNS:
        table = columns((base, *metrics), [(name, *own) for name, own in cells.items()])
    else:
        table = columns(("metric", *cells), list(zip(metrics, *cells.values(), strict=True)))
    return f"results of {', '.join(copies)}\n{table}"


def _without_variant(node_id: str) -> str:
    """The id of the node that was copied: `train` for `train-small`."""
    return node_id.partition("-")[0]


def _is_judged(copies: Mapping[str, Sequence[tuple[str, str, str]]], judged: Collection[str]) -> bool:
    return any(is_judged(name, judged) for rows in copies.values() for name, _, _ in rows)


def result_rows(metrics: Mapping[str, float], judged: Collection[str] = JUDGED) -> list[tuple[str, str, str]]:
    """Rows of name, value and interval, in the order of `figures_in_order`.

    `x_low` and `x_high` become the interval of `x`. A numbered series such as `x_01`, `x_02`, ... becomes one row with
    its first and last value.
    """
    rows = {}
    series: dict[str, list[str]] = {}
    for name in figures_in_order(metrics, judged):
        whole, _, end = name.rpartition("_")
        bounds = [metrics[bound] for bound in (f"{name}_low", f"{name}_high") if bound in metrics]
        if end.isdecimal():
            series.setdefault(whole, []).append(name)
        elif end not in ("low", "high") or not {whole, f"{whole}_low", f"{whole}_high"} <= metrics.keys():
            interval = f"[{shown_number(bounds[0])}, {shown_number(bounds[1])}]" if len(bounds) == 2 else ""
            rows[name] = (name, shown_value(name, metrics), interval)
    for names in series.values():
        first, last = names[0], names[-1]
        if first == last:
            rows[first] = (first, shown_number(metrics[first]), "")
        else:
            shown = f"{first}..{last.rpartition('_')[2]}"
            rows[first] = (shown, f"{shown_number(metrics[first])} .. {shown_number(metrics[last])}", "")
    return [rows[name] for name in figures_in_order(metrics, judged) if name in rows]


def figures_in_order(names: Iterable[str], judged: Collection[str] = JUDGED) -> list[str]:
    """The names of metrics in display order: the judging metric (`eval/tau`), its parts (`eval/tau_image`), all others.

    Within each, metrics with an interval come first, then the order is alphabetical. names: includes interval ends,
    `x_low` and `x_high`. A node may be the prefix: `eval_long/eval/tau`.
    """
    known = set(names)

    def place(name: str) -> tuple[int, bool, str]:
        return _rank(name, judged), not {f"{name}_low", f"{name}_high"} <= known, name

    return sorted(known, key=place)


def is_judged(name: str, judged: Collection[str] = JUDGED) -> bool:
    return any(f"/{name}".endswith(f"/{each}") for each in judged)


def _rank(name: str, judged: Collection[str]) -> int:
    if is_judged(name, judged):
        return 0
    return 1 if any(f"/{each}_" in f"/{name}" for each in judged) else 2


def is_main(name: str, main_figures: str) -> bool:
    """Whether a metric is one of an op's main figures, or an end of its interval. name: may have a node as prefix.

    main_figures: a regular expression; "" matches every name.
    """
    return not main_figures or re.fullmatch(rf"(.+/)?({main_figures})(_low|_high)?", name) is not None


def shown_seconds(node: NodeState) -> str:
    """The seconds that a node took, or since a running node began, as text."""
    if node.state == "running" and node.started is not None:
        return f"{time.time() - node.started:.0f} s"
    return "" if node.seconds is None else f"{node.seconds:.1f} s"


def shown_value(name: str, metrics: Mapping[str, float]) -> str:
    """The value of a metric as text; for a speed-up with a meaningless interval a text that it is not known."""
    ends = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    return NOT_KNOWN if name.endswith(SPEEDUP) and not is_known(*ends) else shown_number(metrics[name])


def shown_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """The first few metrics in one line; "" for none."""
    return ", ".join(f"{name} {shown_number(value)}" for name, value in list(metrics.items())[:METRICS_SHOWN])


WINDOW = 30  # reports of progress that the speed is taken from


@define
class Live:
    """The progress of one attempt, made from its events. metrics: those of the newest event.

    done, total: units of work; None without progress.
    """

    done: int | None = None
    total: int | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    _reports: deque[tuple[float, int]] = field(factory=lambda: deque(maxlen=WINDOW))  # (time, done), of one series

    def __str__(self) -> str:
        return self._with_metrics([self.reached, *self._pace()])

    @property
    def reached(self) -> str:
        """The progress of a node as text, `40 of 200`; "" without progress."""
        return "" if self.done is None else f"{self.done} of {self.total}"

    @property
    def reached_with_metrics(self) -> str:
        """The progress and metrics of an attempt that has ended, without speed."""
        return self._with_metrics([self.reached])

    def add(self, event: Event) -> bool:
        """Add an event. Returns whether it changes progress or metrics."""
        match event.body:
            case Progress(done, total):
                if self.done is not None and done < self.done:
                    self._reports.clear()
                self.done, self.total = done, total
                self._reports.append((event.time, done))
            case Metric(_, metrics):
                self.metrics = metrics
            case _:
                return False
        return True

    def _with_metrics(self, progress: Sequence[str]) -> str:
        return ": ".join(text for text in (", ".join(filter(None, progress)), shown_metrics(self.metrics)) if text)

    def _pace(self) -> list[str]:
        """The speed and time left as texts, `2.5/s`, `1 min 4 s left`, from the last reports.

        Empty before the second report, and after the last.
        """
        if len(self._reports) < 2:
            return []
        if self.done == 0:
            return ["time left unknown before the first is done"]
        (first_time, first), (last_time, last) = self._reports[0], self._reports[-1]
        seconds, left = last_time - first_time, (self.total or 0) - last
        if seconds <= 0 or last <= first or left <= 0:
            return []
        speed = (last - first) / seconds
        shown = f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each"
        return [shown, f"{shown_duration(left / speed)} left"]
