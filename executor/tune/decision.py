"""What successive halving decides, as a function of recorded results only: which trainings are still to be done, which
trials go on, and which one is best.

At a rung, all trials that reached it are ranked by tau on val, of equal ones the earlier trial first. One in eta,
rounded up, goes on to the next rung; the others stop, also where the interval of their difference from the best
includes 0: such a trial is marked as not told apart. The best of the last rung is the winner. A trial whose training
failed stops. With a budget of hours, the first trial is trained to the first rung alone, and as many trials begin as
fit at its pace; and of those that would go on from a rung, the best ones do whose time to the next rung, at their own
pace, still fits.

Which results are there decides how far the halving is, not what it decides: so it may be killed at any point.

Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization (2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from attrs import frozen

from executor.tune.points import kept_count
from ops.evaluate.comparison import FEWEST, measure_ratios
from ops.train_dflash.answers import Answer

HOUR = 3600.0


@frozen
class Result:
    """A trial that was trained to a rung. seconds: from the rung before. answers: to the prompts of the split val."""

    trial: int
    steps: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tau(self) -> float:
        """Tokens per verification step over all prompts; 1, that of plain decoding, where no prompt needs a step."""
        steps = sum(answer.steps for answer in self.answers)
        return sum(answer.generated for answer in self.answers if answer.steps) / steps if steps else 1.0


@frozen
class Failure:
    """A trial whose training to a rung failed."""

    trial: int
    steps: int
    message: str


@frozen
class Rules:
    """What was announced. trials: their number. rungs, eta, budget_hours: as in [tune]."""

    trials: int
    rungs: tuple[int, ...]
    eta: int = 2
    budget_hours: float | None = None


@frozen
class Ranked:
    """A trial at a rung. bounds: the interval of tau. above: its tau minus that of the best, by the prompts that both
    answered, with the interval of it; None for the best itself.
    """

    trial: int
    tau: float
    seconds: float
    bounds: tuple[float, float] | None
    above: float | None = None
    above_bounds: tuple[float, float] | None = None

    @property
    def is_told_apart(self) -> bool:
        """Whether the trial is worse than the best by more than chance."""
        return self.above_bounds is not None and self.above_bounds[1] < 0


@frozen
class Rung:
    """A rung that is decided. ranked: the best first. kept: the trials that go on, in that order. unaffordable: those
    that would have gone on with more hours.
    """

    steps: int
    ranked: tuple[Ranked, ...]
    failed: tuple[Failure, ...]
    kept: tuple[int, ...]
    unaffordable: tuple[int, ...] = ()


@frozen
class Decision:
    """pending: the trials that are to be trained to the rung `steps` now; empty at the end. winner: None until then,
    and where every training failed. not_begun: trials for which budget_hours had no time.
    """

    rungs: tuple[Rung, ...]
    pending: tuple[int, ...] = ()
    steps: int = 0
    winner: int | None = None
    not_begun: tuple[int, ...] = ()


def decide(rules: Rules, records: Iterable[Result | Failure]) -> Decision:
    """What the records decide, in whichever order they are; records that halving does not ask for do not count."""
    found = {(record.trial, record.steps): record for record in records}
    alive: Sequence[int] = range(rules.trials)
    if rules.budget_hours is not None:
        alive, is_known = _affordable_at_first(rules, found)
        if not is_known:
            return Decision((), tuple(alive), rules.rungs[0])
    not_begun = tuple(trial for trial in range(rules.trials) if trial not in alive)
    rungs: list[Rung] = []
    spent = 0.0
    for place, steps in enumerate(rules.rungs):
        pending = tuple(trial for trial in sorted(alive) if (trial, steps) not in found)
        if pending:
            return Decision(tuple(rungs), pending, steps, None, not_begun)
        records_here = [found[trial, steps] for trial in sorted(alive)]
        results = [record for record in records_here if isinstance(record, Result)]
        ranked = _ranked(results)
        spent += sum(result.seconds for result in results)
        kept = [each.trial for each in ranked[: kept_count(len(alive), rules.eta)]]
        unaffordable: list[int] = []
        if place + 1 == len(rules.rungs):
            kept = []
        elif rules.budget_hours is not None:
            earlier = rules.rungs[place - 1] if place else 0
            growth = (rules.rungs[place + 1] - steps) / (steps - earlier)
            costs = {result.trial: growth * result.seconds for result in results}
            kept, unaffordable = _affordable(kept, costs, rules.budget_hours * HOUR - spent)
        failed = tuple(record for record in records_here if isinstance(record, Failure))
        rungs.append(Rung(steps, ranked, failed, tuple(kept), tuple(unaffordable)))
        if not kept:
            break
        alive = kept
    last = rungs[-1].ranked
    return Decision(tuple(rungs), winner=last[0].trial if last else None, not_begun=not_begun)


def _affordable_at_first(rules: Rules, found: Mapping[tuple[int, int], Result | Failure]) -> tuple[Sequence[int], bool]:
    """The trials that begin with a budget of hours, and True; or the first one alone, and False, until its pace is
    known.
    """
    first = rules.rungs[0]
    for trial in range(rules.trials):
        record = found.get((trial, first))
        if record is None:
            return [trial], False
        if isinstance(record, Result):
            count = int((rules.budget_hours or 0) * HOUR // max(record.seconds, 1e-9))
            return range(min(rules.trials, trial + max(1, count))), True
    return range(rules.trials), True


def _affordable(kept: Sequence[int], costs: Mapping[int, float], seconds: float) -> tuple[list[int], list[int]]:
    """The trials that fit into these seconds, the best first, and the others."""
    fitting: list[int] = []
    for place, trial in enumerate(kept):
        seconds -= costs[trial]
        if seconds < 0:
            return fitting, list(kept[place:])
        fitting.append(trial)
    return fitting, []


def _ranked(results: Sequence[Result]) -> tuple[Ranked, ...]:
    order = sorted(results, key=lambda result: (-result.tau, result.trial))
    return tuple(compared(result, order[0]) for result in order)


def compared(result: Result, best: Result) -> Ranked:
    """A result beside the best one of its rung, by the prompts that both answered with a verification step."""
    own, others = ({answer.id: answer for answer in each.answers if answer.steps} for each in (result, best))
    common = [name for name in own if name in others]
    above = None if result is best else result.tau - best.tau
    if len(common) < FEWEST:
        return Ranked(result.trial, result.tau, result.seconds, None, above)
    sums = [
        np.array([[(each[name].generated, each[name].steps) for name in common]], dtype=np.float64)
        for each in (others, own)
    ]
    measured = measure_ratios(sums, is_ratio=False)
    assert measured is not None  # every prompt has a step
    bounds, beside = measured.intervals[1], measured.beside[1]
    if result is best or beside is None:
        return Ranked(result.trial, result.tau, result.seconds, bounds)
    return Ranked(result.trial, result.tau, result.seconds, bounds, *beside)
