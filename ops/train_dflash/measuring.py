"""Measuring on the split val while the draft trains: loss, accuracy and tau, at intervals and after the last step.

It does not affect the training: no random number is drawn, and the weights are unchanged. With a moving
average, the average is measured. Measurements decide the step whose weights are exported.

One row a measurement, a JSON object: {"step"}; where val has features with anchors {"loss", "accuracy", "expected_tau",
"accuracy_by_slot"}; where tau is measured {"tau": {"all" or a category: {"tau", "low", "high", "prompts", "steps",
"generated"}}}, null for a figure without a value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import define
from torch import Tensor

from dsl.errors import DataError
from dsl.stage import Stage
from ops.evaluate.intervals import tau_names
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.training.checkpoint import Checkpoints, TrainState, saved_weights
from ops.lib.training.dtensors import gathered, reshard
from ops.train_dflash.batches import Labels
from ops.train_dflash.conflicts import NO_VAL
from ops.train_dflash.engine import Setup
from ops.train_dflash.inputs import Inputs
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.short_evaluation import Lend, ShortEvaluation
from ops.train_dflash.step import measure
from ops.train_dflash.tally import WEIGHT, accuracy, expected_tau, found_means, mean_loss, slot_accuracy

Row = dict[str, Any]
FIGURES = ("tau", "low", "high", "prompts", "steps", "generated")


@define
class Measuring:
    """seconds: spent measuring in this attempt, which began at `started`."""

    config: TrainDflash
    stage: Stage
    setup: Setup
    state: TrainState
    evaluation: ShortEvaluation | None
    started: float
    seconds: float = 0.0

    @classmethod
    def open(
        cls, config: TrainDflash, stage: Stage, inputs: Inputs, setup: Setup, state: TrainState, lend: Lend | None
    ) -> Measuring:
        """Raises DataError if the split val has no samples to select by."""
        if config.select == "loss" and not _has_anchor(inputs.val):
            raise DataError(NO_VAL["loss"])
        evaluation = ShortEvaluation.open(config, stage, inputs, setup.place.device, lend)
        return cls(config, stage, setup, state, evaluation, time.perf_counter())

    def measure(self) -> float | None:
        """Measures the state, logs it and keeps the row in the state; returns its `selection_metric`.

        Raises DataError if no prompt has a verification step, so that there is no tau to select by.
        """
        began = time.perf_counter()
        with self._averaged():
            tally = self._tally()
            taus = None if self.evaluation is None else self.evaluation.measure(self.state.model)
        self.seconds += time.perf_counter() - began
        if tally is None and taus is None:
            return None
        engine = self.setup.engine
        found = engine.model.config.algorithm.metrics(engine.loss.needs_teacher)
        row = measured_row(self.state.step, tally, taus, found)
        if self.config.select == "tau" and row["tau"]["all"]["tau"] is None:
            prompts = row["tau"]["all"]["prompts"]
            raise DataError(
                f"there is no tau to select by: the target ends its answers to all {prompts} prompts of the split val "
                "with the first token"
            )
        self.state.measured.append(row)
        self.stage.log({**metrics_of(row), "val/time_share": self.measurements()["measuring_share"]}, self.state.step)
        return selection_metric(self.config.select, row)

    def selected(self) -> int:
        """The step whose weights are exported, once the last one was measured."""
        return selected_step(self.config.select, self.state.measured, self.state.step)

    def log_selected(self, step: int) -> None:
        """Logs the selected step and its metric, not necessarily the last measured one."""
        row = row_of(self.state.measured, step)
        assert row is not None  # the step was selected by it
        values = metrics_of(row)
        figures = {
            name: values[f"val/{name}"] for name in ("loss", "tau", "tau_low", "tau_high") if f"val/{name}" in values
        }
        logged = {"step": float(step), **figures}
        self.stage.log({f"val/selected_{name}": value for name, value in logged.items()}, self.state.step)

    def measurements(self) -> dict[str, float]:
        """Seconds of this attempt, and those spent measuring."""
        seconds = time.perf_counter() - self.started
        return {"seconds": seconds, "measuring_seconds": self.seconds, "measuring_share": self.seconds / seconds}

    def weights_of(self, step: int, checkpoints: Checkpoints) -> dict[str, Tensor]:
        """The weights, or their average, of the last step or of the best one before it, float32; on rank 0 only."""
        if step != self.state.step:
            checkpoints.wait()
            found = saved_weights(self.stage.work_dir, self.state, step) if self.stage.rank == 0 else {}
            return {name: weight.float() for name, weight in found.items()}
        weights = {}
        with self._averaged():
            reshard(self.state.model)
            for name, parameter in self.state.model.named_parameters():
                whole = gathered(parameter)
                if self.stage.rank == 0:
                    weights[name] = whole.float().cpu().clone(memory_format=torch.contiguous_format)
        return weights

    def _tally(self) -> Tensor | None:
        """None if the features have no such split, or no anchor in it."""
        if not len(self.setup.val.reader):
            return None
        tally = measure(self.setup.engine, self.setup.val, self.config.buffer_batches)
        return tally if tally[WEIGHT] else None

    def _averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has the moving average's weights, if there is one."""
        return nullcontext() if self.state.ema is None else self.state.ema.swapped()


def _has_anchor(reader: Labels) -> bool:
    """Whether some sample of a split has a place for one."""
    masks = (reader.labels(sample)[1] for sample in range(len(reader)))
    return any(len(draw_anchors(mask_S, 1, seed=0, epoch=0, sample=0)) for mask_S in masks)


def measured_row(
    step: int, tally: Tensor | None, taus: Mapping[str, Mapping[str, Any]] | None, found: Sequence[str]
) -> Row:
    """The row of a step. tally: of the val split; taus: see ShortEvaluation; found: the algorithm's metrics."""
    row: Row = {"step": step}
    if tally is not None:
        loss = mean_loss(tally)
        row["loss"] = loss if math.isfinite(loss) else None
        row["accuracy"] = accuracy(tally, found)
        row["expected_tau"] = expected_tau(tally, found)
        row["accuracy_by_slot"] = slot_accuracy(tally, found)
        if found:
            row["found"] = found_means(tally, found)
    if taus is not None:
        row["tau"] = {name: {figure: tau[figure] for figure in FIGURES} for name, tau in taus.items()}
    return row


def metrics_of(row: Row) -> dict[str, float]:
    """A row by its metric names in MLflow; figures without a value are omitted."""
    values = {f"val/{name}": row[name] for name in ("loss", "accuracy", "expected_tau") if name in row}
    values |= {f"val/{name}": value for name, value in row.get("found", {}).items()}
    for category, tau in row.get("tau", {}).items():
        values |= zip(tau_names("val/tau", category), (tau["tau"], tau["low"], tau["high"]), strict=True)
    return {name: value for name, value in values.items() if value is not None}


def row_of(rows: Sequence[Row], step: int) -> Row | None:
    """The measurements after a step."""
    return next((row for row in rows if row["step"] == step), None)


def selection_metric(select: str, row: Row) -> float | None:
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
        value = selection_metric(select, row)
        if value is not None and value < least:
            best, least = row["step"], value
    return best
