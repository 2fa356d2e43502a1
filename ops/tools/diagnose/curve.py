"""Whether the training learnt, whether it ended too early, judged by its loss curve, and which steps it skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from statistics import fmean, stdev, variance
from typing import Any

from dsl.finding import Finding
from ops.lib.training.nonfinite import MOST_SKIPPED
from ops.tools.diagnose.judgement import LENGTH, LOSS_CURVE, SKIPPED_STEPS, judged, unmeasured
from ops.train_dflash.verdicts import LONGER, MOST_FALL, PARTS, is_before_last_part, is_short, skipped_steps

GONE = "the run that trained the draft is gone, with its loss"
LEAST_POINTS = 4  # in each of the parts
ERRORS = 2.0  # standard errors of the difference
HIGH = log(2)  # a loss above it: the right token has a probability below 1/2


def curve_finding(curve: Sequence[Sequence[float]], training: Mapping[str, Any]) -> Finding:
    """A finding on whether the training ended too early, judged by the loss.

    curve: [step, train/loss], as logged, ascending. training: training.json, which names the exported step. If that is
    before the last fifth, longer training does not help, however far the loss still falls.
    """
    if not curve:
        return unmeasured(LENGTH, GONE)
    end = curve[-1][0]
    parts = [_part(curve, PARTS - 2), _part(curve, PARTS - 1)]
    if min(map(len, parts)) < LEAST_POINTS and is_short(end):
        return unmeasured(LENGTH, f"{end:g} steps are too few to see where train/loss is heading; {LONGER}")
    if min(map(len, parts)) < LEAST_POINTS:
        return unmeasured(
            LENGTH, f"{len(curve)} points of train/loss are too few; lower log_every of the next training"
        )
    fall = fmean(parts[0]) - fmean(parts[1])
    error = sqrt(sum(variance(part) / len(part) for part in parts))
    selected = training.get("selected_step", end)
    is_earlier = is_before_last_part(selected, end)
    best = {"tau": "tau on val was best", "loss": "the loss on val was lowest"}
    chosen_by = best.get(training.get("recipe", {}).get("select"), "the weights are those")
    return judged(
        name=LENGTH,
        measured=(f"{chosen_by} at step {selected} of {end:g}; " if is_earlier else "")
        + f"train/loss fell by {fall:.2f} (+- {error:.2f}) in the last fifth of {end:g} steps, to "
        f"{fmean(parts[1]):.2f}",
        normal=f"by less than {MOST_FALL:g}: a larger fall still makes the right token over 10 % more likely, with "
        "a learning rate of almost 0",
        advice=LONGER,
        is_cause=not is_earlier and fall > MOST_FALL and fall > ERRORS * error,
    )


def flat_finding(curve: Sequence[Sequence[float]]) -> Finding:
    """A finding on whether the loss stayed high, without falling from the second fifth of the training to the last."""
    if not curve:
        return unmeasured(LOSS_CURVE, GONE)
    second, last = _part(curve, 1), _part(curve, PARTS - 1)
    if min(len(second), len(last)) < LEAST_POINTS:
        return unmeasured(LOSS_CURVE, f"{len(curve)} points of train/loss are too few; lower log_every")
    end, final = curve[-1][0], fmean(last)
    fall = fmean(second) - final
    is_flat = final > HIGH and fall <= MOST_FALL
    near = final + max(MOST_FALL, stdev(last))
    since = next(step for step, loss in curve if loss <= near)
    text = f"train/loss was {fmean(second):.2f} in the second fifth of {end:g} steps, and {final:.2f} in the last"
    return judged(
        name=LOSS_CURVE,
        measured=f"{text}: flat since step {since:g}" if is_flat else text,
        normal=f"it falls by more than {MOST_FALL:g} between them, or to below {HIGH:.2f}, where the right token has a "
        "probability of 1/2",
        advice="the draft stopped learning early: lower lr of train_dflash or raise its warmup_ratio, and train longer",
        is_cause=is_flat,
    )


def skipped_finding(training: Mapping[str, Any]) -> Finding:
    """A finding on whether steps of the training changed no weight. training: training.json; empty if that is gone."""
    if "steps" not in training:
        return unmeasured(SKIPPED_STEPS, "the training's record is gone")
    skipped = skipped_steps(training)
    return judged(
        name=SKIPPED_STEPS,
        measured=skipped.text,
        normal=f"at most {MOST_SKIPPED:.0%}: a skipped step changes no weight",
        advice=skipped.advice,
        is_cause=skipped.are_many,
    )


def _part(curve: Sequence[Sequence[float]], part: int) -> list[float]:
    """The losses of one fifth of the steps. part: its number, from 0."""
    end = curve[-1][0]
    return [loss for step, loss in curve if end * part / PARTS < step <= end * (part + 1) / PARTS]
