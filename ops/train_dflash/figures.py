"""Figures of a training: the loss over the steps, and the accuracy of each slot."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure


def loss_figure(losses: Sequence[float]) -> Figure:
    """Loss of every step."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", title="Loss of the draft")
    return figure


def accuracy_figure(train: Sequence[float], val: Sequence[float] | None) -> Figure:
    """Accuracy of slots 1..K-1 over the last steps and, where there is one, on the val split."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    slots = range(1, len(train) + 1)
    axes.plot(slots, train, marker="o", label="train")
    if val is not None:
        axes.plot(slots, val, marker="s", label="val")
    axes.set(xlabel="slot", ylabel="accuracy", title="Accuracy by slot", ylim=(0, 1))
    axes.legend()
    return figure
