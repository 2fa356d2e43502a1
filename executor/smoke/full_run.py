"""What the full run will take, from the times at which its trial on a few samples reported progress: the table after a
smoke run, and whether this machine has it.

A node's time is a + b * amount: a, what comes before the first progress, between two series and after the last, stays
as it is; b comes from the progress itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from attrs import frozen

from dsl.estimate import Amount, Growth
from dsl.memory import machine_memory
from dsl.shown import shown_bytes
from executor.records.events import Event, Progress
from executor.system.hardware import gpu_memory
from executor.system.output import columns, print_lines

ALIKE = 1.25  # a spread of no more than this is one figure
UNITS = ((86400.0, 3.0, "days"), (3600.0, 1.5, "h"), (60.0, 1.5, "min"))  # (seconds, smallest number shown, name)


@frozen
class Spread:
    """A range of time: at least and at most, in seconds."""

    low: float
    high: float

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.low + other.low, self.high + other.high)


NOTHING = Spread(0.0, 0.0)
ENOUGH = 4  # reports that distinguish the first step from the others


@frozen(kw_only=True)
class NodeEstimate:
    """The predicted needs of a node in the full run.

    cached: the store holds its artifact, so all else is zero. tried: seconds of the trial. disk: bytes in the store at
    the end, checkpoints included. memory, gpu_memory: peak bytes of the trial's ranks together, None where not
    measured. needed: bytes that a rank of the full run needs, as its op estimates. fails: whether it would fail for the
    reason in the notes.
    """

    cached: bool
    tried: float = 0.0
    time: Spread = NOTHING
    disk: float = 0.0
    memory: int | None = None
    gpu_memory: int | None = None
    needed: int = 0
    ranks: int = 1
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    fails: bool = False


@frozen
class Report:
    """A progress report: `done` of `total` units at `time`."""

    time: float
    done: int
    total: int


def reports(events: Iterable[Event], node: str, attempt: int) -> list[Report]:
    """The progress reports of one attempt at a node, from the run's events."""
    return [
        Report(event.time, event.body.done, event.body.total)
        for event in events
        if isinstance(event.body, Progress) and (event.node, event.attempt) == (node, attempt)
    ]


def series_of(reported: Sequence[Report]) -> list[list[Report]]:
    """The progress reports, split into series where counting began anew."""
    series: list[list[Report]] = []
    for report in reported:
        if not series or report.done < series[-1][-1].done:
            series.append([])
        series[-1].append(report)
    return series


def full_time(started: float, ended: float, reported: Sequence[Report], growth: Growth) -> Spread:
    """The time of the full run, from a trial's progress reports. Series that do not grow keep their time.

    An amount without a series, from a stage that reported no progress, may account for all of the time or none of it.
    """
    series = series_of(reported)
    stays = max(0.0, ended - started)
    grown = NOTHING
    begun = started
    for reports_of_one, amount in zip(series, growth.series, strict=False):
        spent, full = _grown(begun, reports_of_one, amount)
        stays, grown = max(0.0, stays - spent), grown + full
        begun = reports_of_one[-1].time
    unreported = [amount.growth for amount in growth.series[len(series) :]]
    tail = max(0.0, ended - reported[-1].time) if reported else 0.0
    most = stays * max([1.0, *unreported]) + tail * (growth.tail - 1)
    return grown + Spread(stays * min([1.0, *unreported]), most)


def _grown(begun: float, reported: Sequence[Report], amount: Amount) -> tuple[float, Spread]:
    """The seconds of the trial that belong to a series of progress, and its time in the full run.

    The lower bound uses the usual pace, the upper one the mean: a checkpoint waits for the disk once in the trial, and
    an unknown number of times in the full run. The extra time of the first step counts once, as it compiles and fills
    caches.
    """
    first, last = reported[0], reported[-1]
    counted = last.done - first.done
    if counted <= 0 or last.total <= 0:  # reported only at its end: all since the last report, or nothing of it
        spent = max(0.0, last.time - begun)
        return spent, Spread(spent * min(1.0, amount.least_growth), spent * max(1.0, amount.growth))
    pace = usual_pace(reported)
    once = 0.0
    if len(reported) >= ENOUGH:
        once = max(0.0, reported[1].time - first.time - pace * (reported[1].done - first.done))
    seen = max(0.0, last.time - first.time - once)
    mean = seen / counted * last.total
    unseen = min(mean * first.done / last.total, max(0.0, first.time - begun))  # done before the first report
    paces = sorted((mean, pace * last.total))
    return seen + unseen, Spread(paces[0] * amount.least_growth, paces[1] * amount.growth)


def usual_pace(reported: Sequence[Report]) -> float:
    """The median seconds for one unit of work, weighted by the work done."""
    steps = [(after.time - before.time, after.done - before.done) for before, after in pairwise(reported)]
    paces = sorted((max(0.0, seconds) / count, count) for seconds, count in steps if count > 0)
    half = sum(count for _, count in paces) / 2
    for pace, count in paces:
        half -= count
        if half <= 0:
            return pace
    return 0.0


def print_estimates(nodes: Mapping[str, NodeEstimate], samples: int, free_disk: int, store: Path) -> bool:
    """Print the table of estimates, notes, sums, what does not fit, and the next command. Returns whether no node of
    the full run would fail.
    """
    time = sum((node.time for node in nodes.values()), NOTHING)
    disk = sum(node.disk for node in nodes.values())
    rows = [(node_id, *_cells(node)) for node_id, node in nodes.items()]
    rows.append(("together", "", shown_time(time), shown_bytes(disk), "", ""))
    header = ("node", "smoke", "full run", "disk", "memory measured", "weights and optimizer")
    print_lines(f"\nthe full run, estimated from {samples} samples of each kind that the data has:")
    print_lines(columns(header, rows, right=header[1:]))
    for node_id, node in nodes.items():
        for note in node.notes:
            print_lines(f"{node_id}: {note}")
    for line in verdicts(nodes, disk, free_disk, store, machine_memory(), gpu_memory):
        print_lines(line)
    if failing := ", ".join(node_id for node_id, node in nodes.items() if node.fails):
        why = f"the full run would fail at {failing}, for the reason above"
        print_lines(f"the smoke run ended, but {why}: change that, and repeat the smoke run", error=True)
    else:
        print_lines("the smoke run succeeded; for the full run: the same command without --smoke")
    return not failing


def _cells(node: NodeEstimate) -> tuple[str, str, str, str, str]:
    if node.cached:
        return "", "cached", "", "", ""
    measured = [shown_bytes(node.memory)] if node.memory else []
    measured += [f"{shown_bytes(node.gpu_memory)} on the GPU"] if node.gpu_memory else []
    needed = f"{shown_bytes(node.needed)}{f' x {node.ranks}' if node.ranks > 1 else ''}" if node.needed else ""
    size, unit = _unit(node.tried)
    return (
        f"{_figure(node.tried / size)} {unit}",
        shown_time(node.time),
        shown_bytes(node.disk),
        " + ".join(measured),
        needed,
    )


def verdicts(
    nodes: Mapping[str, NodeEstimate],
    disk: float,
    free_disk: int,
    store: Path,
    machine: int,
    gpu: Callable[[], int | None],
) -> list[str]:
    """Sentences on whether disk and memory suffice. A node needs the larger of measured and estimated memory."""
    fits = "fits" if disk <= free_disk else "DOES NOT FIT"
    lines = [f"disk: {shown_bytes(disk)}, and {shown_bytes(free_disk)} are free at {store}: {fits}"]
    on_gpu = {node_id: node for node_id, node in nodes.items() if node.device == "cuda"}
    here = {node_id: max(node.memory or 0, _estimated_here(node)) for node_id, node in nodes.items()}
    lines += _memory("memory", here, machine, "this machine has")
    size = gpu() if on_gpu else None
    if size is not None:
        needs = {name: max((node.gpu_memory or 0) // node.ranks, node.needed) for name, node in on_gpu.items()}
        lines += _memory("memory of a GPU", needs, size, "a GPU has")
    return lines


def _estimated_here(node: NodeEstimate) -> int:
    return 0 if node.device == "cuda" else node.needed * node.ranks


def _memory(name: str, needs: Mapping[str, int], size: int, has: str) -> list[str]:
    most = max(needs, key=needs.__getitem__)
    if not needs[most]:
        return []
    too_large = [node_id for node_id, need in needs.items() if need > size]
    fits = f"DOES NOT FIT: {', '.join(too_large)}" if too_large else "fits"
    return [f"{name}: at most {shown_bytes(needs[most])} ({most}), and {has} {shown_bytes(size)}: {fits}"]


def shown_time(time: Spread) -> str:
    """A range of time as text: `about 12 min`, `2.1 to 3.4 h`; below 90 seconds in seconds."""
    if time.high <= max(ALIKE * time.low, time.low + 1):
        middle = (time.low + time.high) / 2
        size, unit = _unit(middle)
        return f"about {_figure(middle / size)} {unit}"
    (small, unit_low), (large, unit_high) = _unit(time.low), _unit(time.high)
    low = _figure(time.low / small) + ("" if unit_low == unit_high else f" {unit_low}")
    return f"{low} to {_figure(time.high / large)} {unit_high}"


def _unit(seconds: float) -> tuple[float, str]:
    for size, least, name in UNITS:
        if seconds >= least * size:
            return size, name
    return 1.0, "s"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
