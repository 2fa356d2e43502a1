"""Train a target on the tokenised samples: AdamW or Muon on the answers' tokens, warm-up and cosine decay.

The loss of a step is the mean cross-entropy over the answer tokens of all its samples, on all ranks: each rank
backpropagates world_size * (its sum) / (all answer tokens), and gradients are averaged over the ranks. So neither the
number of ranks nor the division into forward passes changes more than rounding.

The history holds one float64 row a step. The order of the samples is a function of the seed and the epoch. So a resumed
training continues exactly where it was, and neither log_every, eval_every nor checkpoint_every changes the result.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, define
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsl.errors import DataError, StopRequested
from dsl.op import op_of
from dsl.stage import Stage
from ops.finetune_vlm.batches import Order, passes_of_rank
from ops.finetune_vlm.conflicts import conflicts
from ops.finetune_vlm.measuring import HeldOut
from ops.finetune_vlm.op import SEEING, FinetuneVlm, Part
from ops.finetune_vlm.saving import save_target, saved_for_now
from ops.finetune_vlm.start import freeze, make_optimizer, mask_of, parts_of, set_rates, start_target
from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import TokensForecast, refuse_conflicts
from ops.lib.sequence_parallel.target import ParallelTarget, answer_tokens
from ops.lib.target.checkpoint_files import PROCESSOR, copy_files
from ops.lib.target.model import Target, describe_target, read_config, write_target_json
from ops.lib.target.probe import probe_config
from ops.lib.target.probed import Probe, failed_checks
from ops.lib.training import rank_group
from ops.lib.training.checkpoint import Checkpoints, TrainState
from ops.lib.training.nonfinite import SKIPPED, NonFinite
from ops.lib.training.optimizer import clip_gradients, learning_rate
from ops.lib.vision.batch import ModelInputs
from ops.lib.vision.family_config import is_qwen

BEFORE = "accuracy_before.json"  # in the work folder
RATE, NORM, LOSS, ANSWERS, TOKENS, VAL_LOSS, VAL_ACCURACY = range(7)


def finetune_vlm(config: FinetuneVlm, stage: Stage) -> None:
    """Write the TargetModel artifact; resumes from the newest checkpoint in work_dir.

    On several ranks every step's samples are dealt over the dp ranks, and each sequence over the sp ranks. Raises
    DataError for tokens that do not fit the target and for losses that stay non-finite, ConfigError for fields or a
    mesh that do not fit it, and StopRequested after saving when the stage is asked to stop.
    """
    with (
        rank_group.joined(stage),
        Checkpoints(
            stage.work_dir, _identity(config, stage), rank=stage.rank, keep=config.keep_checkpoints, info=stage.info
        ) as checkpoints,
    ):
        training = _Training.start(config, stage, checkpoints)
        training.run()
        training.write_result()


@define
class _Training:
    config: FinetuneVlm
    stage: Stage
    reader: TokenReader
    held_out: HeldOut
    source: Path | None
    parallel: ParallelTarget
    parts: dict[str, Part]
    order: Order
    checkpoints: Checkpoints
    state: TrainState
    nonfinite: NonFinite
    logged_step: int
    first_step: int
    started: float = Factory(time.perf_counter)
    logged_at: float = Factory(time.perf_counter)

    @classmethod
    def start(cls, config: FinetuneVlm, stage: Stage, checkpoints: Checkpoints) -> _Training:
        reader = TokenReader(stage.inputs["tokens"], "train")
        tokens = stage.inputs["tokens"]
        refuse_conflicts(conflicts(config, {"tokens": TokensForecast.read(tokens.path, tokens.digest)}))
        held_out = HeldOut.read(config, stage)
        target, source = start_target(config, reader, stage)
        freeze(config, target, stage)
        parts = parts_of(target)
        parallel = _parallel(config, stage, target)
        model = target.model.train()
        state = TrainState(model, make_optimizer(config, model, parts), [])
        every = config.checkpoint_every
        checkpoints.resume(state, config.steps, every, started_before=stage.started_before)
        lengths = [record["tokens"] for record in reader.records]
        order = Order(lengths, config.seed or 0, config.batch_size, config.batch_tokens)
        nonfinite = NonFinite(config.max_nonfinite, stage.work_dir, state.counters)
        step = state.step
        return cls(
            config,
            stage,
            reader,
            held_out,
            source,
            parallel,
            parts,
            order,
            checkpoints,
            state,
            nonfinite,
            logged_step=step,
            first_step=step,
        )

    def run(self) -> None:
        """Train all remaining steps."""
        if self.first_step and (self.first_step == self.config.steps or self._measuring_is_due()):
            self._log_where_due()  # the first call of an attempt truncates what earlier ones logged at this step
            self._measure_where_due()
        self._measure_before()
        self.stage.progress(self.state.step, self.config.steps)
        while self.state.step < self.config.steps:
            self._stop_if_asked()
            self.one_step()
            self.report()

    def _stop_if_asked(self) -> None:
        """Save a checkpoint, and raise StopRequested on all ranks, if one of them received a stop request."""
        if rank_group.any_rank(self.stage.stop_requested(), self.parallel.device):
            self.checkpoints.save(self.state)
            self.checkpoints.wait()
            raise StopRequested(
                f"fine-tuning stopped after step {self.state.step} of {self.config.steps}; its progress is saved"
            )

    def one_step(self) -> None:
        """Train one global step: forward, backward and update; its row goes into the history.

        Nothing is updated without an answer token, without a trained part (such as an image, if all else is frozen), or
        with a non-finite loss or gradient.
        """
        config, optimizer = self.config, self.state.optimizer
        samples = self.order.samples(self.state.step + 1)
        passes = passes_of_rank(self.reader, samples, config.micro_batch_tokens, self.stage)
        answers, images = self._totals(passes)
        optimizer.zero_grad(set_to_none=True)
        loss_sum = self._backward(passes, answers) if answers else 0.0
        if not images:
            self._forget_unseen()
        norm = clip_gradients(self.state.model.parameters(), config.grad_clip)
        share = learning_rate(self.state.step, config.steps, 1.0, config.warmup_ratio)
        loss = loss_sum / max(answers, 1)
        names = [self.reader.records[index]["id"] for index in samples]
        if answers and self.nonfinite.accepts(self.state.step + 1, loss, norm, lambda: names):
            set_rates(optimizer, share)
            optimizer.step()
        else:
            norm = loss_sum = 0.0
            answers = 0
        tokens = sum(self.reader.records[index]["tokens"] for index in samples)
        row = [share * config.lr, norm, loss_sum, answers, tokens, math.nan, math.nan]
        self.state.history.append(torch.tensor(row, dtype=torch.float64))

    def _totals(self, passes: list[ModelInputs | None]) -> tuple[int, int]:
        """The number of answer tokens, and of batches with images, summed over all ranks."""
        own = [batch for batch in passes if batch is not None and self.parallel.sp_rank == 0]
        counts = [sum(answer_tokens(batch) for batch in own), sum(batch.has_images for batch in own)]
        answers, images = rank_group.summed(torch.tensor(counts, device=self.parallel.device)).tolist()
        return answers, images

    def _backward(self, passes: list[ModelInputs | None], answers: int) -> float:
        """Add up the gradients of all passes; returns the global sum of the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        self.parallel.hold()
        for number, batch in enumerate(passes, start=1):
            if number == len(passes):
                self.parallel.release()
            loss = self.parallel.answer_loss(batch)
            if loss.requires_grad:  # always true over ranks, by the image of weight zero
                (loss * (self.stage.world_size / answers)).backward()
            total += loss.detach()
        return float(rank_group.summed(total))

    def _forget_unseen(self) -> None:
        """Remove the vision tower's gradients after a step without an image, so that it does not change.

        Ranks run an image of weight zero, whose zero gradients would still trigger weight decay and AdamW's moments. A
        single process has no such gradients.
        """
        for name, parameter in self.state.model.named_parameters():
            if self.parts[name] in SEEING:
                parameter.grad = None

    def report(self) -> None:
        """Log, measure and save after a step, each if it is due."""
        step, config = self.state.step, self.config
        self._log_where_due()
        paused = time.perf_counter()
        self._measure_where_due()
        if step == config.steps or step % config.checkpoint_every == 0:
            self.checkpoints.save(self.state)
        self.logged_at += time.perf_counter() - paused
        self.stage.progress(step, config.steps)

    def write_result(self) -> None:
        """Write the artifact, and measure it on the val and test splits; only rank 0 writes.

        Raises DataError if no step changed the weights.
        """
        applied = int((torch.stack(self.state.history)[:, ANSWERS] > 0).sum())
        warning = self.nonfinite.check_applied(self.state.step, applied)
        directory = self.stage.out_dir / "model"
        save_target(self.parallel, directory, self._code())
        metrics = self._measure_val(directory)
        accuracy = self.held_out.accuracy("test", self.parallel, directory, self._stop_if_asked)
        if accuracy is not None:
            measured_on_test = {"target/accuracy": accuracy, **self._before()}
            metrics |= measured_on_test
            self.stage.log(measured_on_test, step=self.state.step)
        if self.stage.rank:
            return
        if warning is not None:
            self.stage.warn(warning)
        if accuracy is not None:
            self.stage.info(f"accuracy on test: {self._of_samples(accuracy)}")
        copy_files(self.stage.inputs["tokens"].path / "processor", directory, PROCESSOR)
        info = describe_target(
            directory,
            mask_of(self.config, self.reader),
            self.reader.info["eos_token_ids"],
            trust_remote_code=self.config.trust_remote_code,
        )
        figures = {name.removeprefix("target/"): value for name, value in metrics.items()}
        figures["nonfinite_steps"] = self.state.counters.get(SKIPPED, 0)
        probes = self._probes(directory)
        write_target_json(self.stage.out_dir, info | failed_checks(probes), figures)
        measured = {
            **({"probes": [probe.to_json() for probe in probes]} if probes else {}),
            "seconds": time.perf_counter() - self.started,
            "steps_in_this_attempt": self.state.step - self.first_step,
            **self.held_out.facts("test"),
        }
        write_json(self.stage.out_dir / "measurements.json", measured)
        history = torch.stack(self.state.history)
        losses = (history[:, LOSS] / history[:, ANSWERS]).tolist()
        self.stage.figure(
            "training", training_figure(losses, history[:, VAL_LOSS].tolist(), history[:, VAL_ACCURACY].tolist())
        )

    def _probes(self, directory: Path) -> list[Probe]:
        """What holds of a small copy of a target that is not Qwen's, as load_target measures it."""
        config = read_config(directory)
        if is_qwen(config) or config.get("auto_map"):
            return []
        try:
            return [probe_config(config)]
        except DataError as error:
            self.stage.warn(f"nothing was measured of this {config['model_type']}: {error}")
            return []

    def _measure_before(self) -> None:
        """Measure the checkpoint's accuracy on the test split before the first step, and keep it for the result.

        A target with random weights is not measured.
        """
        if self.source is None or self.state.step or self._before() or not self.held_out.compared["test"]:
            return
        with saved_for_now(self.parallel, self.stage.work_dir / "measured", self._code()) as saved:
            accuracy = self.held_out.accuracy("test", self.parallel, saved, self._stop_if_asked)
        if self.stage.rank == 0:
            write_json(self.stage.work_dir / BEFORE, {"target/accuracy_before": accuracy})
            self.stage.info(f"accuracy on test before fine-tuning: {self._of_samples(accuracy)}")

    def _of_samples(self, accuracy: float | None) -> str:
        return f"{accuracy:.3f} of {len(self.held_out.compared['test']):,} samples"

    def _before(self) -> dict[str, float]:
        file = self.stage.work_dir / BEFORE
        return read_json(file) if file.is_file() else {}

    def _code(self) -> Path | None:
        """The checkpoint whose code is copied into the target; None if its code is not trusted."""
        return self.source if self.config.trust_remote_code else None

    def _log_where_due(self) -> None:
        """Log the rows since the last multiple of log_every; the speed is that of this attempt since its last log."""
        step, every = self.state.step, self.config.log_every
        if step % every and step < self.config.steps:
            return
        rows = self.state.history[(step - 1) // every * every :]
        sums = torch.stack(rows).sum(0)
        values = {"target/loss": float(sums[LOSS] / sums[ANSWERS])} if sums[ANSWERS] else {}
        values |= {
            "target/lr": float(rows[-1][RATE]),
            "target/grad_norm": float(rows[-1][NORM]),
            "target/nonfinite_steps": float(self.state.counters.get(SKIPPED, 0)),
        }
        if recent := self.state.history[self.logged_step :]:
            now = time.perf_counter()
            values["target/tokens_per_second"] = float(torch.stack(recent)[:, TOKENS].sum()) / (now - self.logged_at)
            self.logged_at, self.logged_step = now, step
        self.stage.log(values, self.state.step)

    def _measuring_is_due(self) -> bool:
        """Whether a measurement is due at this step and not yet in the history."""
        step, every = self.state.step, self.config.eval_every
        due = every is not None and step % every == 0 and step < self.config.steps
        return due and bool(self.state.history[-1][[VAL_LOSS, VAL_ACCURACY]].isnan().all())

    def _measure_where_due(self) -> None:
        if not self._measuring_is_due():
            return
        folder = self.stage.work_dir / "measured"
        if not self.held_out.compared["val"]:
            self._measure_val(folder)
            return
        with saved_for_now(self.parallel, folder, self._code()) as saved:
            self._measure_val(saved)

    def _measure_val(self, saved: Path) -> dict[str, float]:
        """Measure loss and accuracy on the val split, if it has samples; logs them, and keeps them in the history."""
        metrics = {}
        row = self.state.history[-1]
        loss = self.held_out.loss("val", self.parallel)
        accuracy = self.held_out.accuracy("val", self.parallel, saved, self._stop_if_asked)
        if loss is not None:
            row[VAL_LOSS] = metrics["target/val_loss"] = loss
        if accuracy is not None:
            row[VAL_ACCURACY] = metrics["target/val_accuracy"] = accuracy
        if metrics:
            self.stage.log(metrics, self.state.step)
        return metrics


def _parallel(config: FinetuneVlm, stage: Stage, target: Target) -> ParallelTarget:
    return ParallelTarget.make(
        target,
        world_size=stage.world_size,
        rank=stage.rank,
        sp_degree=stage.sp_degree,
        device=rank_group.device_of(stage),
        dtype=getattr(torch, config.dtype),
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _identity(config: FinetuneVlm, stage: Stage) -> dict[str, Any]:
    """The facts that a checkpoint must match: the config without neutral fields, and the tokens.

    External fields are left out: the work folder belongs to their content, and their path may have changed.
    """
    fields = op_of(config).fields.values()
    values = {entry.name: getattr(config, entry.name) for entry in fields if not (entry.neutral or entry.external)}
    return json.loads(json.dumps({"config": values, "tokens": stage.inputs["tokens"].digest}))


def training_figure(losses: Sequence[float], val_losses: Sequence[float], accuracies: Sequence[float]) -> Figure:
    """A figure of losses and accuracies. Each list has one value per step; NaN where skipped or not measured."""
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
