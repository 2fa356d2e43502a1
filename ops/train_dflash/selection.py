"""Measurements of a draft on the split val while it trains, and the step whose weights are exported.

One row a measurement, a JSON object: {"step"}; where val has features with anchors {"loss", "accuracy", "expected_tau",
"accuracy_by_slot"}; where tau is measured {"tau": {"all" or a category: {"tau", "low", "high", "prompts", "steps",
"generated"}}}, null for a figure that nothing was measured for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ops.evaluate.metric_names import tau_names
from ops.train_dflash.tally import accuracy, expected_tau, mean_loss, slot_accuracy

Row = dict[str, Any]
FIGURES = ("tau", "low", "high", "prompts", "steps", "generated")


def measured_row(step: int, tally: Tensor | None, taus: Mapping[str, Mapping[str, Any]] | None) -> Row:
    """The row of a step. tally: of the val split; taus: see ShortEvaluation."""
    row: Row = {"step": step}
    if tally is not None:
        loss = mean_loss(tally)
        row["loss"] = loss if math.isfinite(loss) else None
        row["accuracy"] = accuracy(tally)
        row["expected_tau"] = expected_tau(tally)
        row["accuracy_by_slot"] = slot_accuracy(tally)
    if taus is not None:
        row["tau"] = {name: {figure: tau[figure] for figure in FIGURES} for name, tau in taus.items()}
    return row


def metrics_of(row: Row) -> dict[str, float]:
    """A row under the names that it has in MLflow; figures without a value are left out."""
    values = {f"val/{name}": row[name] for name in ("loss", "accuracy", "expected_tau") if name in row}
    for category, tau in row.get("tau", {}).items():
        values |= zip(tau_names("val/tau", category), (tau["tau"], tau["low"], tau["high"]), strict=True)
    return {name: value for name, value in values.items() if value is not None}


def row_of(rows: Sequence[Row], step: int) -> Row | None:
    """The measurements after a step."""
    return next((row for row in rows if row["step"] == step), None)


def badness(select: str, row: Row) -> float | None:
    """The selection metric of a row, lowest is best: the loss, or -tau; None: not measured."""
    if select == "loss":
        return row["loss"]
    if select == "tau":
        return -float(row["tau"]["all"]["tau"])
    return None


def selected_step(select: str, rows: Sequence[Row], last: int) -> int:
    """The step whose weights are exported, the earlier of two equal ones; `last` without a selection."""
    best, least = last, math.inf
    for row in rows:
        value = badness(select, row)
        if value is not None and value < least:
            best, least = row["step"], value
    return best
