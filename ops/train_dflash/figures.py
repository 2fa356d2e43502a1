"""Figures of a training: the loss over the steps, the accuracy of each slot, and tau over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


def tau_figure(taus: Sequence[tuple[int, Mapping[str, Any]]], selected: int, block_size: int) -> Figure:
    """tau on the split val after steps, with its interval where there is one, and the step whose weights are exported.

    Of one prompt there is no interval.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    spread = [(step, tau["low"], tau["high"]) for step, tau in taus if tau["low"] is not None]
    if spread:
        steps, lows, highs = zip(*spread, strict=True)
        axes.fill_between(steps, lows, highs, alpha=0.25, label="95 % interval")
    axes.plot([step for step, _ in taus], [tau["tau"] for _, tau in taus], marker="o", label="tau")
    for step, tau in taus:
        if step == selected:
            axes.plot(step, tau["tau"], marker="o", markersize=12, fillstyle="none", color="black", label="exported")
    axes.set(xlabel="step", ylabel="tau", title=f"tau on val, of {block_size}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
