"""Speed-up under load: the curve by batch size and block size, and what follows from it. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from attrs import asdict, frozen


@frozen(kw_only=True)
class LoadPoint:
    """The speed of plain and speculative decoding of the same prompts, in batches and blocks of a size.

    Tokens per second are those of all answers, prefill included. tau is None without a step, and the ends of the
    speed-up's 95 % interval for a single batch.
    """

    batch_size: int
    block_size: int
    tau: float | None
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None

    @property
    def pays(self) -> bool | None:
        """Whether speculative decoding is faster than plain decoding, None if the interval leaves it open."""
        if self.speedup_low is None or self.speedup_high is None:
            return None
        if self.speedup_low > 1:
            return True
        return False if self.speedup_high < 1 else None


def load_curve(points: Sequence[LoadPoint]) -> dict[str, Any]:
    """The curve in measurements.json.

    points: as given, by batch size and block size. best: the point with the highest speed-up of each batch size, as
    batch size, block size and `pays`. pays_up_to: the largest batch size up to which the best block certainly pays at
    every measured size, None if at none. costs_from: the smallest one from which on it certainly costs, or None.
    """
    best = best_points(points)
    paying = [point.batch_size for point in takewhile(lambda point: point.pays is True, best)]
    costing = [point.batch_size for point in takewhile(lambda point: point.pays is False, reversed(best))]
    return {
        "points": [asdict(point) for point in points],
        "best": [{"batch_size": each.batch_size, "block_size": each.block_size, "pays": each.pays} for each in best],
        "pays_up_to": max(paying, default=None),
        "costs_from": min(costing, default=None),
    }


def best_points(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """The point with the highest speed-up of each batch size, the smallest batch first."""
    best: dict[int, LoadPoint] = {}
    for point in points:
        before = best.get(point.batch_size)
        if before is None or point.speedup > before.speedup:
            best[point.batch_size] = point
    return [best[size] for size in sorted(best)]


def points_of(curve: Mapping[str, Any]) -> list[LoadPoint]:
    """The points of a curve in measurements.json."""
    return [LoadPoint(**point) for point in curve["points"]]


def load_text(curve: Mapping[str, Any]) -> str:
    """What a curve says, in a sentence: up to which load the draft pays, and the best block of each."""
    sizes = [best["batch_size"] for best in curve["best"]]
    pays_up_to, costs_from = curve["pays_up_to"], curve["costs_from"]
    parts = [
        "at no measured batch size is it certain that the draft pays"
        if pays_up_to is None
        else f"the draft pays up to batches of {pays_up_to}" + (", the largest measured" * (pays_up_to == sizes[-1]))
    ]
    if costs_from is not None:
        parts.append(f"from batches of {costs_from} plain decoding is faster")
    if len({point["block_size"] for point in curve["points"]}) > 1:
        best = ", ".join(f"{each['block_size']} for {each['batch_size']}" for each in curve["best"])
        parts.append(f"best block by batch: {best}")
    return "; ".join(parts)


def load_metrics(curve: Mapping[str, Any], own_block: int) -> Iterator[tuple[str, float | None]]:
    """The metrics of a curve by their names in MLflow; those of `own_block`, as configured, do not name the block."""
    for point in points_of(curve):
        where = f"batch_{point.batch_size}"
        yield f"eval/plain_tokens_per_second_{where}", point.plain_tokens_per_second
        if point.block_size != own_block:
            where += f"_block_{point.block_size}"
        yield f"eval/tokens_per_second_{where}", point.tokens_per_second
        yield f"eval/speedup_{where}", point.speedup
        yield f"eval/speedup_{where}_low", point.speedup_low
        yield f"eval/speedup_{where}_high", point.speedup_high
    for best in curve["best"]:
        yield f"eval/best_block_batch_{best['batch_size']}", best["block_size"]
    yield "eval/pays_up_to_batch", curve["pays_up_to"]
    yield "eval/costs_from_batch", curve["costs_from"]
