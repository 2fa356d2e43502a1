"""Report sections of `train_dflash`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.lib.data.files import read_json
from ops.lib.report_sections import Account, Section, facts
from ops.train_dflash.verdicts import verdicts

SHOWN = ("steps", "selected_step", "tokens", "anchors", "skipped_steps", "nonfinite_steps", "loss")
NOT_REACHED = "in no step before max_steps"


def report(folder: Path) -> Sequence[Section]:
    """The samples, the training, and the last measurements; the verdicts."""
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


def _window(training: Mapping[str, Any]) -> str:
    steps = training.get("final_steps")
    return "" if steps is None else f"train/... are means of the last {steps} steps, val/... those of the split val"


def train_account(training: Mapping[str, Any]) -> Account:
    """The samples of the train split that were in a step."""
    samples = training["samples"]
    seen = training.get("samples_seen", samples)
    return Account(came_in=samples, kept={"train": seen}, dropped={NOT_REACHED: samples - seen}, splits=("train",))
