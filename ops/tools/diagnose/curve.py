"""Whether the training ended too early, judged by its loss curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, variance
from typing import Any

from ops.tools.diagnose.finding import Finding, unmeasured
from ops.train_dflash.verdicts import LONGER, MOST_FALL, PARTS, is_before_last_part, is_short

NAME = "length of training"
LEAST_POINTS = 4  # in each of the parts
ERRORS = 2.0  # standard errors of the difference


def curve_finding(curve: Sequence[Sequence[float]], training: Mapping[str, Any]) -> Finding:
    """curve: [step, train/loss], as logged, ascending. training: training.json, which names the exported step.

    If that is before the last fifth, longer training does not help, however far the loss still falls.
    """
    if not curve:
        return unmeasured(NAME, "the run that trained the draft is gone, with its loss")
    end = curve[-1][0]
    parts = [
        [loss for step, loss in curve if end * part / PARTS < step <= end * (part + 1) / PARTS]
        for part in (PARTS - 2, PARTS - 1)
    ]
    if min(map(len, parts)) < LEAST_POINTS and is_short(end):
        return unmeasured(NAME, f"{end:g} steps are too few to see where train/loss is heading; {LONGER}")
    if min(map(len, parts)) < LEAST_POINTS:
        return unmeasured(NAME, f"{len(curve)} points of train/loss are too few; lower log_every of the next training")
    fall = fmean(parts[0]) - fmean(parts[1])
    error = sqrt(sum(variance(part) / len(part) for part in parts))
    selected = training.get("selected_step", end)
    is_earlier = is_before_last_part(selected, end)
    best = {"tau": "tau on val was best", "loss": "the loss on val was lowest"}
    chosen_by = best.get(training.get("recipe", {}).get("select"), "the weights are those")
    return Finding(
        name=NAME,
        measured=(f"{chosen_by} at step {selected} of {end:g}; " if is_earlier else "")
        + f"train/loss fell by {fall:.2f} (+- {error:.2f}) in the last fifth of {end:g} steps, to "
        f"{fmean(parts[1]):.2f}",
        normal=f"by less than {MOST_FALL:g}: a larger fall still makes the right token over 10 % more likely, with "
        "a learning rate of almost 0",
        advice=LONGER,
        is_cause=not is_earlier and fall > MOST_FALL and fall > ERRORS * error,
    )
