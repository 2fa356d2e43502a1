"""The figure of a fine-tuning: loss, and held-out loss and accuracy where they were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def training_figure(losses: Sequence[float], val_losses: Sequence[float], accuracies: Sequence[float]) -> Figure:
    """One value a step; nan where a step was skipped or nothing was measured."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="train loss")
    _points(axes, val_losses, "val loss", color="C1", marker="o")
    axes.set(xlabel="step", ylabel="loss per answer token", title="Fine-tuning of the target")
    if any(math.isfinite(value) for value in accuracies):
        right = axes.twinx()
        _points(right, accuracies, "val accuracy", color="C2", marker="s")
        right.set(ylabel="accuracy", ylim=(0, 1.02))
        right.legend(loc="center right")
    axes.legend(loc="upper right")
    return figure


def _points(axes: Axes, values: Sequence[float], label: str, color: str, marker: str) -> None:
    measured = [(step, value) for step, value in enumerate(values, start=1) if math.isfinite(value)]
    if measured:
        steps, shown = zip(*measured, strict=True)
        axes.plot(steps, shown, label=label, color=color, marker=marker)
