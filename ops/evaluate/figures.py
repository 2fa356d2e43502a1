"""The figures of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ops.evaluate.intervals import ALL, OTHERS, PART_LABELS, parted
from ops.evaluate.load import LoadPoint, points_of

SHOWN_NAME = 40  # characters of a group


def figures(report: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The name and figure of each curve of report.json; none without a step. A confidence head and several loads
    add one each.
    """
    if report["tau"][ALL]["steps"]:
        yield "acceptance_by_slot", slots_figure(report)
        yield "accepted_lengths", lengths_figure(report)
        yield "tau_by_position", position_figure(report)
        if tables := parted(report):
            yield "tau_by_part", parts_figure(report, tables)
        if "tau_by_group" in report and report["benchmark"] is None:
            yield "tau_by_group", groups_figure(report)
    if "load" in measured:
        yield "load", load_figure(points_of(measured["load"]))
    if "confidence" in measured:
        yield "confidence", reliability_figure(report, measured["confidence"])


def slots_figure(report: Mapping[str, Any]) -> Figure:
    """A figure of acceptance by position in the block, for the random and the trained draft."""
    figure, axes = _empty(report)
    for key, label in (("acceptance_by_slot", "trained draft"), ("acceptance_by_slot_random", "random draft")):
        if key in report:
            axes.plot(range(1, len(report[key]) + 1), report[key], marker="o", label=label)
    axes.set(xlabel="slot of the block", ylabel="share of steps in which it was accepted", ylim=(-0.02, 1.02))
    axes.legend()
    return figure


def lengths_figure(report: Mapping[str, Any]) -> Figure:
    """A figure of how often a step accepted each number of draft tokens."""
    figure, axes = _empty(report)
    counts = report["accepted_lengths"]
    axes.bar(range(len(counts)), [count / max(sum(counts), 1) for count in counts])
    axes.set(xlabel="tokens of the draft that a step accepted", ylabel="share of the steps")
    return figure


def position_figure(report: Mapping[str, Any]) -> Figure:
    """A figure of tau by the part of the answer in which steps began, with 95 % intervals."""
    figure, axes = _empty(report)
    parts = report["tau_by_position"]
    names = [f"{part['first']}-{part['last']}" for part in parts]
    axes.errorbar(range(len(parts)), [part["tau"] for part in parts], yerr=_reach(parts), marker="o", capsize=3)
    axes.axhline(report["tau"]["all"]["tau"], linestyle="--", linewidth=1, label="all steps")
    axes.set_xticks(range(len(parts)), names, rotation=45, ha="right")
    axes.set(xlabel="token of the answer at which the step began", ylabel="tau", ylim=(0, None))
    axes.legend()
    return figure


def parts_figure(report: Mapping[str, Any], tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """A figure of tau by context, turn and kind, beside each other, with 95 % intervals. tables: see `parted`."""
    figure = Figure(figsize=(max(7.0, 3.5 * len(tables)), 4), layout="constrained")
    for axes, (table, parts) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        taus = list(parts.values())
        axes.errorbar(range(len(taus)), [part["tau"] for part in taus], yerr=_reach(taus), marker="o", capsize=3)
        axes.axhline(report["tau"]["all"]["tau"], linestyle="--", linewidth=1, label="all steps")
        axes.set_xticks(range(len(taus)), list(parts), rotation=45, ha="right")
        axes.set(xlabel=PART_LABELS[table], ylabel="tau", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def groups_figure(report: Mapping[str, Any]) -> Figure:
    """A figure of the tau of each group with a step, the lowest first, with 95 % intervals."""
    figure, axes = _empty(report)
    taus = report["tau_by_group"]
    order = sorted(taus, key=lambda group: (taus[group]["tau"], group))
    parts = [taus[group] for group in order]
    figure.set_size_inches(7, max(4.0, 1.5 + 0.25 * len(order)))
    axes.errorbar([part["tau"] for part in parts], range(len(parts)), xerr=_reach(parts), marker="o", linestyle="")
    axes.axvline(report["tau"]["all"]["tau"], linestyle="--", linewidth=1, label="all prompts")
    names = [
        group if len(group) <= SHOWN_NAME else f"{group[:SHOWN_NAME]}..."
        for group in (group or OTHERS for group in order)
    ]
    axes.set_yticks(range(len(parts)), [name.replace("$", r"\$") for name in names])
    axes.set(xlabel="tau", xlim=(0, None))
    axes.legend()
    return figure


def _reach(parts: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """How far the intervals reach below and above tau; 0 without one."""
    return [
        [0.0 if part["low"] is None else max(0.0, part["tau"] - part["low"]) for part in parts],
        [0.0 if part["high"] is None else max(0.0, part["high"] - part["tau"]) for part in parts],
    ]


def reliability_figure(report: Mapping[str, Any], confidence: Mapping[str, Any]) -> Figure:
    """A figure of the share of accepted slots over the predicted confidence, by bins; areas show the number
    of slots.
    """
    figure, axes = _empty(report)
    parts = confidence["reliability"]
    said, accepted = ([part[name] for part in parts] for name in ("confidence", "accepted"))
    axes.plot([0, 1], [0, 1], linestyle="--", linewidth=1, label="calibrated")
    line = axes.plot(said, accepted, label=f"ECE {confidence['ece']:.3f} ({confidence['bins']} bins)")[0]
    sizes = [10 + 300 * part["slots"] / confidence["slots"] for part in parts]
    axes.scatter(said, accepted, s=sizes, color=line.get_color(), alpha=0.6)
    axes.set(xlabel="confidence", ylabel="share accepted", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    axes.legend()
    return figure


def load_figure(points: Sequence[LoadPoint]) -> Figure:
    """A figure of tokens per second and of the speed-up over the batch size, a line for each block size."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    speeds, ratios = figure.subplots(1, 2)
    plain = {point.batch_size: point.plain_tokens_per_second for point in points}
    speeds.plot(list(plain), list(plain.values()), marker="o", linestyle="--", color="gray", label="plain")
    for size in sorted({point.block_size for point in points}):
        line = [point for point in points if point.block_size == size]
        batches, label = [point.batch_size for point in line], f"blocks of {size}"
        speeds.plot(batches, [point.tokens_per_second for point in line], marker="o", label=label)
        parts = [{"tau": each.speedup, "low": each.speedup_low, "high": each.speedup_high} for each in line]
        ratios.errorbar(
            batches, [each.speedup for each in line], yerr=_reach(parts), marker="o", capsize=3, label=label
        )
    ratios.axhline(1, linestyle="--", linewidth=1, color="gray", label="plain")
    for axes, name in ((speeds, "tokens / s"), (ratios, "speed-up")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(plain), [str(size) for size in plain])
        axes.set(xlabel="batch size", ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _empty(report: Mapping[str, Any]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"tau {report['tau']['all']['tau']:.2f} of {report['block_size']}")
    axes.grid(alpha=0.3)
    return figure, axes
