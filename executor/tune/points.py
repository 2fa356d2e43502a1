"""The points of a space that are tried: all of a grid, or as many as are asked for, drawn by the seed.

They depend on the table [tune] only, never on results, so they are known before the first trial. Of a space, fewer
trials are the first of more trials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

from attrs import frozen

from dsl.tune import Choice, Point, Tune

DRAWS = 1000  # for a point that is not there yet


@frozen
class Points:
    """The points of the trials, in their order.

    beyond: points that were drawn, and are left out for budget_steps. others: further points of a grid; None where
    ranges have more.
    """

    tried: tuple[Point, ...]
    beyond: tuple[Point, ...]
    others: int | None


def points_of(tune: Tune) -> Points:
    """The points of a table [tune], as many as its budget of steps allows; none where it allows no trial."""
    drawn = _drawn(tune)
    table = tune.table
    count = len(drawn)
    if table.budget_steps is not None:
        while count and halving_steps(count, table.rungs, table.eta) > table.budget_steps:
            count -= 1
    has_endless = tune.size is None and len(drawn) == table.trials
    others = None if has_endless else (tune.size or len(drawn)) - len(drawn)
    return Points(tuple(drawn[:count]), tuple(drawn[count:]), others)


def halving_steps(trials: int, rungs: Sequence[int], eta: int) -> int:
    """The training steps of successive halving: every trial to the first rung, one in eta of them to the next, ...."""
    counts = halving_counts(trials, len(rungs), eta)
    return sum(count * (rung - earlier) for count, earlier, rung in zip(counts, (0, *rungs), rungs, strict=False))


def halving_counts(trials: int, rungs: int, eta: int) -> list[int]:
    """The number of trials at each rung."""
    counts = [trials]
    while len(counts) < rungs:
        counts.append(kept_count(counts[-1], eta))
    return counts


def kept_count(trials: int, eta: int) -> int:
    """The number of trials that go on from a rung: one in eta, rounded up."""
    return math.ceil(trials / eta)


def _drawn(tune: Tune) -> list[Point]:
    wanted = tune.table.trials
    if tune.size is not None and (wanted is None or wanted >= tune.size):
        grids = [axis.options if isinstance(axis, Choice) else () for axis in tune.axes]
        names = [axis.name for axis in tune.axes]
        return [dict(zip(names, options, strict=True)) for options in itertools.product(*grids)]
    random = Random(tune.table.seed)
    found: dict[tuple[str, ...], Point] = {}
    draws = 0
    while len(found) < (wanted or 0) and draws < DRAWS:
        point = {axis.name: axis.draw(random) for axis in tune.axes}
        key = tuple(option.shown for option in point.values())
        draws = draws + 1 if key in found else 0
        found.setdefault(key, point)
    return list(found.values())
