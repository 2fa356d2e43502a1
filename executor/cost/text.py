"""The cost of a training as `dflow plan` prints it."""

from __future__ import annotations

from pathlib import Path

from dsl.shown import shown_bytes
from executor.cost.constants import CPU
from executor.cost.model import Cost, Part, Way
from executor.system.output import columns

HEADER = ("", "side", "GPUs", "hours", "GPU hours", "busy", "memory each", "disk", "wire a host", "limited by")


def cost_text(node_id: str, cost: Cost, free_disk: int, store: Path) -> str:
    """The table of a training's cost, and what to change."""
    device = "processes of a CPU" if cost.gpu == CPU.name else cost.gpu
    tokens = f"{cost.tokens / 1e6:,.0f} million tokens in {cost.epochs:.3g} epochs"
    length = "" if cost.is_counted else ", every sample taken as long as the longest"
    rows = [
        row for name, way in _ways(cost) for row in (_row(name, "capture", way.capture), _row("", "train", way.train))
    ]
    both = cost.rates
    lines = [
        f"{node_id} on {cost.gpus:,} x {device}, {cost.hosts:,} host{'s' * (cost.hosts != 1)}: {tokens}, "
        f"{cost.token_bytes:,} bytes of features a token{length}",
        columns(HEADER, rows, right=HEADER[2:-1]),
        *(line for name, way in _ways(cost) for line in _what_to_change(name, way)),
        f"stored features take {shown_bytes(cost.stored.stored_bytes)}; {shown_bytes(free_disk)} are free at {store}",
        f"capture: {both.capture:,.0f} tokens/s a GPU ({both.capture_source})",
        f"training: {both.train:,.0f} tokens/s a GPU ({both.train_source})",
    ]
    return "\n".join(lines)


def _ways(cost: Cost) -> tuple[tuple[str, Way], tuple[str, Way]]:
    return ("stored", cost.stored), ("streamed", cost.streamed)


def _row(name: str, side: str, part: Part) -> tuple[str, ...]:
    return (
        name,
        side,
        f"{part.gpus:,}",
        f"{part.hours:,.2f}",
        f"{part.gpu_hours:,.1f}",
        f"{part.busy:.0%}",
        shown_bytes(part.memory),
        f"{shown_bytes(part.disk)}/s" if part.disk else "",
        f"{shown_bytes(part.wire)}/s" if part.wire else "",
        part.limit,
    )


def _what_to_change(name: str, way: Way) -> list[str]:
    """How long a way takes, with how many workers, and a line for each thing to change."""
    how = ""
    if name == "streamed":
        how = ", where each rank captures for itself"
        if way.workers:
            how = f" with {way.workers:,} capture workers for {way.train.gpus:,} ranks"
    return [f"{name}: {way.hours:,.1f} h{how}, limited by {way.bottleneck}:", *(f"  {line}" for line in way.advice)]
