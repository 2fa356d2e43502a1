"""The output after a smoke run: what each node of the full run will need, and whether this machine has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dsl.sizes import shown_bytes
from executor.smoke.estimate import NOTHING, NodeEstimate, Spread
from executor.system.hardware import gpu_memory, machine_memory
from executor.system.output import columns, print_lines

ALIKE = 1.25  # a spread of no more than this is one figure
UNITS = ((86400.0, 3.0, "days"), (3600.0, 1.5, "h"), (60.0, 1.5, "min"))  # (seconds, smallest number shown, name)


def print_estimates(nodes: Mapping[str, NodeEstimate], samples: int, free_disk: int, store: Path) -> None:
    """The table, notes, sums, what does not fit, and what to type next."""
    time = sum((node.time for node in nodes.values()), NOTHING)
    disk = sum(node.disk for node in nodes.values())
    rows = [(node_id, *_cells(node)) for node_id, node in nodes.items()]
    rows.append(("together", "", shown_time(time), shown_bytes(disk), "", ""))
    header = ("node", "smoke", "full run", "disk", "memory measured", "weights and optimizer")
    print_lines(f"\nthe full run, estimated from {samples} samples of each kind (with images, without):")
    print_lines(columns(header, rows, right=header[1:]))
    for node_id, node in nodes.items():
        for note in node.notes:
            print_lines(f"{node_id}: {note}")
    for line in verdicts(nodes, disk, free_disk, store, machine_memory(), gpu_memory):
        print_lines(line)
    print_lines("the smoke run succeeded; for the full run: the same command without --smoke")


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
    """Whether disk and memory suffice; a node's memory is the larger of what was measured and what its ranks hold."""
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
    """`about 12 min`, `2.1 to 3.4 h`; under 90 seconds in seconds."""
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
