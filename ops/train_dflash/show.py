"""Report sections of `train_dflash`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve, frozen

from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import plain
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.sizes import MASTER, draft_parameters
from ops.lib.report_sections import Account, Cell, Compared, Section, Table, facts, variants
from ops.train_dflash.verdicts import verdicts

SHOWN = ("steps", "selected_step", "tokens", "anchors", "skipped_steps", "nonfinite_steps", "loss")
NOT_REACHED = "in no step before max_steps"


def report(folder: Path) -> Sequence[Section]:
    """The report sections of a training: samples, facts, last measurements, and verdicts."""
    training = read_json(folder / "training.json")
    measured = {**(training.get("final_metrics") or {}), **(training.get("val_metrics") or {})}
    anchorless = training["samples_without_anchor"]
    note = f"{anchorless} samples of a step had no anchor, and were not trained on" if anchorless else ""
    return [
        Section("samples", train_account(training)),
        Section("training", facts(training, SHOWN), note),
        Section("measured at the end", facts(measured), _window(training)),
        *verdicts(training),
    ]


def compare(artifacts: Sequence[Compared]) -> Sequence[Section]:
    """The report sections that compare drafts: their costs, and their algorithms' metrics on val."""
    found = [(variant, [_costs(folder) for folder in variant.folders]) for variant in variants(artifacts)]
    metrics = dict.fromkeys(name for _, costs in found for cost in costs for name in cost.val)
    steps = [[cost.step for cost in costs if cost.step is not None] for _, costs in found]
    first = median(steps[0]) if steps[0] else None
    rows: list[Sequence[Cell]] = []
    for (variant, costs), of_variant in zip(found, steps, strict=True):
        step = median(of_variant) if of_variant else None
        rows.append(
            (
                variant.name,
                costs[0].parameters,
                costs[0].added,
                round(costs[0].added * MASTER / 1e6, 2),
                None if step is None else round(1000 * step, 1),
                None if step is None or first is None else round(step / first, 2),
                *(_mean([cost.val[name] for cost in costs if name in cost.val]) for name in metrics),
            )
        )
    head = (
        "draft",
        "parameters",
        "beside plain DFlash",
        "MB of these",
        "step in ms",
        f"times that of {found[0][0].name}",
    )
    return [
        Section(
            "size and cost",
            Table((*head, *metrics), rows),
            "MB in float32. A step: the median of a training's, and of those the median over the seeds; as long as in "
            "the run that made the draft, whatever ran beside it. val/...: means over the seeds.",
        )
    ]


@frozen
class _Costs:
    """The size and cost of a draft.

    added: parameters beyond plain DFlash's. step: seconds. val: the algorithm's metrics, and the accuracy.
    """

    parameters: int
    added: int
    step: float | None
    val: Mapping[str, float]


def _costs(folder: Path) -> _Costs:
    draft = from_serving(read_json(folder / "config.json"))
    measurements = folder / "measurements.json"  # not a part of the artifact's content
    step = read_json(measurements).get("step_seconds") if measurements.exists() else None
    of_val = read_json(folder / "training.json").get("val_metrics") or {}
    names = [f"val/{name}" for name in ("accuracy", *draft.algorithm.metrics(with_teacher=True))]
    val = {name: of_val[name] for name in names if name in of_val}
    parameters = draft_parameters(draft)
    return _Costs(parameters, parameters - draft_parameters(evolve(draft, algorithm=plain())), step, val)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _window(training: Mapping[str, Any]) -> str:
    steps = training.get("final_steps")
    return "" if steps is None else f"train/... are means of the last {steps} steps, val/... those of the split val"


def train_account(training: Mapping[str, Any]) -> Account:
    """The account of the train split's samples that were in a step."""
    samples = training["samples"]
    seen = training.get("samples_seen", samples)
    return Account(came_in=samples, kept={"train": seen}, dropped={NOT_REACHED: samples - seen}, splits=("train",))
