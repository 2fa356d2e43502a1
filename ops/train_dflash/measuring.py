"""Measuring on the split val while the draft trains: loss, accuracy and tau, at intervals and after the last step.

It does not affect the training: no random number is drawn, and the weights are unchanged. With a moving
average, the average is measured. Measurements decide the step whose weights are exported.

One row a measurement, a JSON object: {"step"}; where val has features with anchors {"loss", "accuracy", "expected_tau",
"accuracy_by_slot"}; where tau is measured {"tau": {"all" or a category: {"tau", "low", "high", "prompts", "steps",
"generated"}}}, null for a figure without a value.

tau is that of real, greedy speculative decoding of the same few prompts. They are cut into batches before these are
dealt over the ranks, so a batch, and with it each answer, is the same on any number of ranks. The draft decodes from a
copy of its weights, whole and in the dtype of the training, that lives on every rank: the layers that train are
sharded, and compiled for other shapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import asdict, define, frozen
from torch import Tensor, nn

from dsl.errors import DataError
from dsl.stage import Stage
from ops.evaluate.intervals import tau_names
from ops.evaluate.lengths import check_lengths, spread_prompts
from ops.evaluate.prompts import Prompt
from ops.evaluate.statistics import acceptance_length
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import Decoded
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_speculative_batch
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.forecasts import TargetStated
from ops.lib.target.model import Target, check_images_fit, text_config
from ops.lib.training import rank_group
from ops.lib.training.checkpoint import Checkpoints, TrainState, saved_weights
from ops.lib.training.dtensors import gathered, reshard
from ops.train_dflash.answers import Answer
from ops.train_dflash.batches import Labels
from ops.train_dflash.conflicts import NO_VAL
from ops.train_dflash.engine import Setup
from ops.train_dflash.inputs import Inputs
from ops.train_dflash.op import PROMPTS_AT_ONCE, TrainDflash
from ops.train_dflash.step import measure
from ops.train_dflash.tally import WEIGHT, accuracy, expected_tau, found_means, mean_loss, slot_accuracy

Row = dict[str, Any]
Lend = Callable[[], AbstractContextManager[Target]]  # grants exclusive use of the target
RESAMPLINGS = 2000
FIGURES = ("tau", "low", "high", "prompts", "steps", "generated")


@define
class Measuring:
    """Measures a training on the split val. seconds: spent on it in this attempt, which began at `started`.

    answers: those of the newest measurement of tau in this attempt, in the order of its prompts. measured_at: its step.
    """

    config: TrainDflash
    stage: Stage
    setup: Setup
    state: TrainState
    evaluation: ShortEvaluation | None
    started: float
    seconds: float = 0.0
    answers: Sequence[Answer] = ()
    measured_at: int | None = None

    @classmethod
    def open(
        cls, config: TrainDflash, stage: Stage, inputs: Inputs, setup: Setup, state: TrainState, lend: Lend | None
    ) -> Measuring:
        """Prepare the measurements. Raises DataError if the split val has no samples to select by."""
        if config.select == "loss" and not _has_anchor(inputs.val):
            raise DataError(NO_VAL["loss"])
        evaluation = ShortEvaluation.open(config, stage, inputs, setup.place.device, lend)
        return cls(config, stage, setup, state, evaluation, time.perf_counter())

    def measure(self) -> float | None:
        """Measure the current state, log the result, and add its row to the state; returns the `selection_metric`.

        Raises DataError if no prompt has a verification step, so that there is no tau to select by.
        """
        began = time.perf_counter()
        with self._averaged():
            tally = self._tally()
            taus = None
            if self.evaluation is not None:
                taus, self.answers = self.evaluation.measure(self.state.model)
        self.seconds += time.perf_counter() - began
        self.measured_at = self.state.step
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
        """The step whose weights are exported; call it once the last step was measured."""
        return selected_step(self.config.select, self.state.measured, self.state.step)

    def log_selected(self, step: int) -> None:
        """Log the selected step and its metric, which may not be the last measured one."""
        row = row_of(self.state.measured, step)
        assert row is not None  # the step was selected by it
        values = metrics_of(row)
        figures = {
            name: values[f"val/{name}"] for name in ("loss", "tau", "tau_low", "tau_high") if f"val/{name}" in values
        }
        logged = {"step": float(step), **figures}
        self.stage.log({f"val/selected_{name}": value for name, value in logged.items()}, self.state.step)

    def measurements(self) -> dict[str, float]:
        """The seconds of this attempt, and those spent measuring."""
        seconds = time.perf_counter() - self.started
        return {"seconds": seconds, "measuring_seconds": self.seconds, "measuring_share": self.seconds / seconds}

    def weights_of(self, step: int, checkpoints: Checkpoints) -> dict[str, Tensor]:
        """The weights, or their average, of the last step or of the best one before it, float32; empty except on rank
        0.
        """
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
        """The tally of the split val; None if the features have no such split, or no anchor in it."""
        if not len(self.setup.val.reader):
            return None
        tally = measure(self.setup.engine, self.setup.val, self.setup.val.ready(self.config.buffer_batches))
        return tally if tally[WEIGHT] else None

    def _averaged(self) -> AbstractContextManager[None]:
        """Open a context in which the model has the moving average's weights, if there is one."""
        return nullcontext() if self.state.ema is None else self.state.ema.swapped()


def _has_anchor(reader: Labels) -> bool:
    """Whether any sample of a split has a place for an anchor."""
    masks = (reader.labels(sample)[1] for sample in range(len(reader)))
    return any(len(draw_anchors(mask_S, 1, seed=0, epoch=0, sample=0)) for mask_S in masks)


def measured_row(
    step: int, tally: Tensor | None, taus: Mapping[str, Mapping[str, Any]] | None, found: Sequence[str]
) -> Row:
    """The row of measurements at a step. tally: of the val split. taus: see ShortEvaluation.

    found: names of the algorithm's metrics.
    """
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
    """The metrics in a row under their names in MLflow; missing values are omitted."""
    values = {f"val/{name}": row[name] for name in ("loss", "accuracy", "expected_tau") if name in row}
    values |= {f"val/{name}": value for name, value in row.get("found", {}).items()}
    for category, tau in row.get("tau", {}).items():
        values |= zip(tau_names("val/tau", category), (tau["tau"], tau["low"], tau["high"]), strict=True)
    return {name: value for name, value in values.items() if value is not None}


def row_of(rows: Sequence[Row], step: int) -> Row | None:
    """The row of measurements at a step; None if it was not measured."""
    return next((row for row in rows if row["step"] == step), None)


def selection_metric(select: str, row: Row) -> float | None:
    """The selection metric of a row, lowest is best: the loss, or -tau; None: not measured."""
    if select == "loss":
        return row["loss"]
    if select == "tau":
        return -float(row["tau"]["all"]["tau"])
    return None


def selected_step(select: str, rows: Sequence[Row], last: int) -> int:
    """The step whose weights are exported: the best by `select`, the earlier of equal ones; `last` without
    a selection.
    """
    best, least = last, math.inf
    for row in rows:
        value = selection_metric(select, row)
        if value is not None and value < least:
            best, least = row["step"], value
    return best


@frozen(eq=False)
class ShortEvaluation:
    """Measures tau during training: the prompts in batches, the target, and the draft's copy; every rank has one."""

    batches: Sequence[Sequence[TokenSample]]
    lend: Lend
    draft: DraftModel
    settings: DecodeSettings
    rank: int
    world_size: int

    @classmethod
    def open(
        cls, config: TrainDflash, stage: Stage, inputs: Inputs, device: torch.device, lend: Lend | None
    ) -> ShortEvaluation | None:
        """Prepare the evaluation of val prompts; None if the config requests none or the split is empty.

        lend: gives a target that is already loaded; otherwise it is loaded here, in the capture's dtype. Raises
        DataError for images that the target cannot read, and for prompts whose answers could exceed the positions of
        target or draft.
        """
        if not config.measures_tau:
            return None
        reader = TokenReader(stage.inputs["tokens"], "val")
        prompts = spread_prompts(Prompt.held_out(reader), config.eval_prompts)
        prompts.sort(key=lambda prompt: prompt.length)
        if not prompts:
            return None
        text = text_config(stage.inputs["target"])
        check_lengths(prompts, text, inputs.draft, config.eval_new_tokens, "eval_new_tokens")
        chosen = [prompt.sample() for prompt in prompts]
        if lend is None:
            target = Target.load(stage.inputs["target"], str(device), getattr(torch, inputs.captured["dtype"]))
            check_images_fit(reader, target.family)
            lend = _always(target)
        used = stage.inputs["target"]
        at_once = 1 if TargetStated.read(used.path, used.digest).unbatched_reason else PROMPTS_AT_ONCE
        draft = DraftModel(inputs.draft).to(device, getattr(torch, config.dtype)).eval().requires_grad_(False)
        return cls(
            batches=[chosen[start : start + at_once] for start in range(0, len(chosen), at_once)],
            lend=lend,
            draft=draft,
            settings=DecodeSettings(max_new_tokens=config.eval_new_tokens),
            rank=stage.rank,
            world_size=stage.world_size,
        )

    def measure(self, model: nn.Module) -> tuple[dict[str, dict[str, Any]], list[Answer]]:
        """Measure tau of the model's current weights, over all prompts under "all", and by category; a collective.

        Each has its 95 % interval, prompts, steps and generated tokens, as in the report of `evaluate`. Beside it, the
        answer to each prompt.
        """
        self._copy(model)
        own = range(self.rank, len(self.batches), self.world_size)
        with self.lend() as target:
            answers = {
                place: decode_speculative_batch(target, self.draft, self.batches[place], self.settings) for place in own
            }
        everywhere = {place: decoded for part in rank_group.collected(answers) for place, decoded in part.items()}
        groups: dict[str, list[Decoded]] = {"all": []}
        each = []
        for place, batch in enumerate(self.batches):
            for sample, answer in zip(batch, everywhere[place], strict=True):
                groups["all"].append(answer)
                groups.setdefault(sample.category, []).append(answer)
                each.append(Answer(sample.id, sample.category, answer.generated, answer.steps))
        size = self.draft.config.block_size
        taus = {name: asdict(acceptance_length(group, RESAMPLINGS, 0, size)) for name, group in groups.items()}
        return taus, each

    @torch.no_grad()
    def _copy(self, model: nn.Module) -> None:
        """Copy the model's weights into the draft, gathered if they are sharded."""
        reshard(model)
        own = dict(self.draft.named_parameters())
        for name, parameter in model.named_parameters():
            own[name].copy_(gathered(parameter))


def _always(target: Target) -> Lend:
    """A function that lends a target which has no other users."""
    return lambda: nullcontext(target)
