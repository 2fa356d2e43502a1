"""The result of a search as rows and sentences: how far each trial came, why it stopped, the cost, what was left out.

They are data, which the command prints and the page shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from dsl.tune import trial_name
from executor.system.output import shown_duration
from executor.tune.decision import Decision, Ranked, Rung
from executor.tune.points import kept_count
from executor.tune.rival import Rival
from executor.tune.trials import Trials
from ops.evaluate.rivals import RIVALS

COLUMNS = ("trial", "values", "steps", "tau", "interval", "above the best", "its interval", "seconds", "why it ended")
PLAIN = ("plain decoding", "", "", "1.00", "", "", "", "", "what every tau is measured against")
UNKNOWN_SPEED = (
    "its speed-up is not known, as times of so few prompts differ too much: measure it on more, by a node of evaluate "
    "with {}"
)


@frozen
class Curve:
    """tau of a trial over the rungs: (steps, tau, its interval or None)."""

    trial: str
    points: Sequence[tuple[int, float, tuple[float, float] | None]]


@frozen
class Outcome:
    """rows: under COLUMNS, the best trial first. sentences: cost and what was not tried. curves: for the picture."""

    winner: str
    values: Mapping[str, str]
    rows: Sequence[tuple[str, ...]]
    cost: Sequence[str]
    not_tried: Sequence[str]
    curves: Sequence[Curve]


def outcome_of(trials: Trials, decision: Decision, rivals: Mapping[str, Rival | str]) -> Outcome:
    """The outcome of a decision that has a winner. rivals: by their names in RIVALS, or why one has no row."""
    assert decision.winner is not None
    measured = {name: rival for name, rival in rivals.items() if isinstance(rival, Rival)}
    return Outcome(
        winner=trial_name(decision.winner),
        values=trials.shown(decision.winner),
        rows=[*_rows(trials, decision), *(_of_rival(name, rival) for name, rival in measured.items()), PLAIN],
        cost=list(_cost(trials, decision)),
        not_tried=[
            *_not_tried(trials, decision),
            *(f"{RIVALS[name]}: {why}" for name, why in rivals.items() if name not in measured),
        ],
        curves=_curves(decision),
    )


def _rows(trials: Trials, decision: Decision) -> Iterator[tuple[str, ...]]:
    """The trials by how far they came, those of a rung by their place in it."""
    seconds = dict.fromkeys(range(trials.rules.trials), 0.0)
    for rung in decision.rungs:
        for each in rung.ranked:
            seconds[each.trial] += each.seconds
    for rung in reversed(decision.rungs):
        for each in rung.ranked:
            if each.trial not in rung.kept:
                why = _why(trials, decision, rung, each)
                yield (*_head(trials, each.trial), str(rung.steps), *_figures(each), f"{seconds[each.trial]:.0f}", why)
        for failure in rung.failed:
            spent = f"{seconds[failure.trial]:.0f}"
            why = f"failed: {failure.message.splitlines()[0]}"
            yield (*_head(trials, failure.trial), f"before {rung.steps}", "", "", "", "", spent, why)


def _of_rival(name: str, rival: Rival) -> tuple[str, ...]:
    speed = UNKNOWN_SPEED.format(name)
    if rival.speedup is not None:
        speed = f"{rival.speedup:.2f} times as fast as plain decoding"
    why = f"{'the target has' if name == 'mtp' else 'you have'} it already; {speed}"
    values = f"block_size = {rival.block_size}"
    return RIVALS[name], values, "", *_figures(rival.ranked), f"{rival.ranked.seconds:.0f}", why


def _head(trials: Trials, trial: int) -> tuple[str, str]:
    return trial_name(trial), ", ".join(f"{name} = {value}" for name, value in trials.shown(trial).items())


def _figures(ranked: Ranked) -> tuple[str, str, str, str]:
    above = "" if ranked.above is None else f"{ranked.above:+.3f}"
    return f"{ranked.tau:.3f}", _bounds(ranked.bounds), above, _bounds(ranked.above_bounds)


def _bounds(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _why(trials: Trials, decision: Decision, rung: Rung, ranked: Ranked) -> str:
    if ranked.trial == decision.winner:
        return "the best"
    count = len(rung.ranked) + len(rung.failed)
    if ranked.trial in rung.unaffordable:
        return "no hours left in the budget"
    apart = "" if ranked.is_told_apart else "; not told apart from the best"
    if rung is decision.rungs[-1]:
        return f"not the best at the last rung{apart}"
    return f"not among the best {kept_count(count, trials.rules.eta)} of {count}{apart}"


def _cost(trials: Trials, decision: Decision) -> Iterator[str]:
    steps, seconds, earlier = 0, 0.0, 0
    for rung in decision.rungs:
        steps += (rung.steps - earlier) * len(rung.ranked)
        seconds += sum(each.seconds for each in rung.ranked)
        earlier = rung.steps
    every = trials.rules.trials * trials.rules.rungs[-1]
    yield (
        f"{steps:,} training steps in {shown_duration(seconds)} of all trainings together; all {trials.rules.trials} "
        f"trials to step {trials.rules.rungs[-1]} take {every:,} steps"
    )


def _not_tried(trials: Trials, decision: Decision) -> Iterator[str]:
    points = trials.points
    if points.beyond:
        yield f"{len(points.beyond)} more trials, for which budget_steps has no room"
    if decision.not_begun:
        yield f"{', '.join(map(trial_name, decision.not_begun))}: budget_hours has no room for their first rung"
    if points.others:
        yield f"{points.others:,} more combinations of the lists: raise trials"
    if points.others is None:
        yield "other values of the ranges: raise trials"
    stopped = [
        trial_name(each.trial)
        for rung in decision.rungs[:-1]
        for each in rung.ranked
        if each.trial not in rung.kept and not each.is_told_apart
    ]
    if stopped:
        yield f"more steps for {', '.join(stopped)}, which stopped without being told apart from the best"
    yield "several seeds of a trial" + ("" if trials.tune.table.eagle3 else "; an EAGLE-3 draft: set eagle3 of [tune]")
    yield "speed of the trials, as tau counts tokens, not time"


def _curves(decision: Decision) -> list[Curve]:
    points: dict[int, list[tuple[int, float, tuple[float, float] | None]]] = {}
    for rung in decision.rungs:
        for each in rung.ranked:
            points.setdefault(each.trial, []).append((rung.steps, each.tau, each.bounds))
    return [Curve(trial_name(trial), points[trial]) for trial in sorted(points)]
