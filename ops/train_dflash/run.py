"""Train a DFlash draft on the target's features, from its inputs to the draft's checkpoint.

Features are stored, or captured during training by the same ranks (online.py) or by a pool (capture_pool.py).
Measurements on the split val may select the step whose weights are exported: measuring.py. A training may end early and
be continued by another one: pause.py.

The history holds one float64 row a step: learning rate, norm of the gradient, then the step's tally. What is logged
is a function of it and of the clock, so neither log_every nor checkpoint_every nor a resume changes the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from attrs import Factory, define, frozen
from torch import Tensor

from dsl.errors import StopRequested
from dsl.stage import Stage
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.hooks import no_hidden_matrices, undecayed
from ops.lib.forecasts import TargetStated
from ops.lib.target.float8_errors import MeanErrors
from ops.lib.target.sizes import state_bytes
from ops.lib.training import rank_group
from ops.lib.training.checkpoint import Checkpoints, TrainState
from ops.lib.training.nonfinite import SKIPPED, NonFinite
from ops.lib.training.optimizer import gradient_norm, learning_rate, limit_gradients, make_optimizer, set_rate
from ops.lib.training.weights import Ema
from ops.train_dflash.answers import write_answers
from ops.train_dflash.capture_pool import CapturePool, agreement
from ops.train_dflash.capture_worker import serve
from ops.train_dflash.engine import Setup, set_up
from ops.train_dflash.hardware import Stopwatch, matmul_peak, peak_memory
from ops.train_dflash.inputs import Inputs, open_inputs
from ops.train_dflash.measuring import Lend, Measuring, row_of
from ops.train_dflash.online import Ask, Capture, describe_features, measured
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.pause import keep_state, take_over
from ops.train_dflash.prefetch import Prefetch
from ops.train_dflash.result import NORM, RATE, TALLY, identity, write_result
from ops.train_dflash.step import Prepared, train_step
from ops.train_dflash.tally import (
    ANCHORLESS,
    ANCHORS,
    FLOPS,
    HEAD,
    LOSS,
    TOKENS,
    WEIGHT,
    mean_loss,
    metrics,
    slot_means,
)


def train_dflash(config: TrainDflash, stage: Stage) -> None:
    """Train over the plan of batches and write a DraftCheckpoint; resumes from the newest checkpoint in work_dir.

    Over several ranks every step's samples are dealt over the dp ranks and each sample's context and blocks over the sp
    ranks, which changes results only by rounding; a worker of the pool does not train, but captures for the ranks.
    Raises DataError for inputs that do not belong together and for losses that stay non-finite, ConfigError for
    a mesh that does not fit, and StopRequested after saving when the stage is asked to stop.
    """
    if stage.pool is not None and stage.pool.worker is not None:
        captured = describe_features(config, stage.inputs["tokens"], stage.inputs["target"])
        facts = agreement(stage, captured, config.capture_batch_tokens)
        serve(_capture(config, stage, captured).take, stage, stage.pool, facts, rank_group.device_of(stage))
        return
    with rank_group.joined(stage):
        inputs = open_inputs(config, stage)
        rounding = MeanErrors(inputs.captured["target_layer_ids"])
        with _capturing(config, stage, inputs) as source:
            ask = source.ask and measured(source.ask, rounding)
            ahead = 0 if source.pool is None else config.buffer_batches - 1
            _train(config, stage, inputs, set_up(config, stage, inputs, ask, ahead), source, rounding)


def _train(
    config: TrainDflash, stage: Stage, inputs: Inputs, setup: Setup, source: _Source, rounding: MeanErrors
) -> None:
    with Checkpoints(
        stage.work_dir, identity(config, stage, inputs), rank=stage.rank, keep=config.keep_checkpoints, info=stage.info
    ) as checkpoints:
        training = _Training.start(config, stage, inputs, setup, checkpoints, source, rounding)
        training.run()
        training.finish()


@frozen
class _Source:
    """A rank's source of online features, None for stored ones. lend: lends the target, if this rank has it."""

    ask: Ask | None = None
    lend: Lend | None = None
    pool: CapturePool | None = None


@contextmanager
def _capturing(config: TrainDflash, stage: Stage, inputs: Inputs) -> Iterator[_Source]:
    """Open this rank's source of online features."""
    if config.capture == "stored":
        yield _Source()
        return
    lengths = {"train": inputs.train.lengths, "val": inputs.val.lengths}
    tokens = sum(map(sum, lengths.values()))
    states = len(inputs.captured["target_layer_ids"]) + inputs.captured["final_hidden"]
    size = tokens * states * state_bytes(inputs.captured["hidden_size"], config.capture_dtype, config.feature_dtype)
    pool = stage.pool
    who = "the training ranks" if pool is None else f"a pool of {pool.workers} worker{'s' * (pool.workers != 1)}"
    stage.info(f"online: {size / 1e9:.2f} GB of features are captured on the fly by {who} and not stored")
    if pool is None:
        capture = _capture(config, stage, inputs.captured)
        yield _Source(capture.ask, capture.lend)
        return
    if idle := config.idle_workers(pool.workers, stage.world_size // stage.sp_degree):
        stage.warn(idle)
    facts = agreement(stage, inputs.captured, config.capture_batch_tokens)
    with CapturePool(stage, pool, inputs.captured, lengths, facts) as capture_pool:
        yield _Source(capture_pool.ask, pool=capture_pool)


def _capture(config: TrainDflash, stage: Stage, captured: Mapping[str, Any]) -> Capture:
    tokens, target = stage.inputs["tokens"], stage.inputs["target"]
    is_unbatched = TargetStated.read(target.path, target.digest).unbatched_reason
    batch_tokens = 1 if is_unbatched else config.capture_batch_tokens
    return Capture(tokens, target, captured, rank_group.device_of(stage), batch_tokens)


@define
class _Training:
    """A training on this rank. rounding: of float8 features that it captures, so far."""

    config: TrainDflash
    stage: Stage
    inputs: Inputs
    setup: Setup
    checkpoints: Checkpoints
    state: TrainState
    measuring: Measuring
    nonfinite: NonFinite
    pool: CapturePool | None
    rounding: MeanErrors
    first_step: int
    logged_step: int
    warned_of_rounding: bool = False
    waiting: Stopwatch = Factory(Stopwatch)
    logged_at: float = Factory(time.perf_counter)
    step_seconds: list[float] = Factory(list)

    @classmethod
    def start(
        cls,
        config: TrainDflash,
        stage: Stage,
        inputs: Inputs,
        setup: Setup,
        checkpoints: Checkpoints,
        source: _Source,
        rounding: MeanErrors,
    ) -> _Training:
        model = setup.engine.model
        optimizer = make_optimizer(
            model,
            config.weight_decay,
            kind=config.optimizer,
            no_hidden_matrices=no_hidden_matrices(model),
            undecayed=undecayed(model),
        )
        ema = Ema(model, config.ema_decay) if config.ema_decay is not None else None
        state = TrainState(model, optimizer, [], ema)
        total, every = len(inputs.steps), config.checkpoint_every
        take_over(stage)
        checkpoints.resume(state, total, every, started_before=stage.started_before)
        measuring = Measuring.open(config, stage, inputs, setup, state, source.lend)
        nonfinite = NonFinite(config.max_nonfinite, stage.work_dir, state.counters)
        step = state.step
        return cls(
            config,
            stage,
            inputs,
            setup,
            checkpoints,
            state,
            measuring,
            nonfinite,
            source.pool,
            rounding,
            step,
            logged_step=step,
        )

    @property
    def total(self) -> int:
        """The steps of the whole training, over which the learning rate changes."""
        return len(self.inputs.steps)

    @property
    def end(self) -> int:
        """The last step of this node."""
        return self.total if self.config.pause_after is None else self.config.pause_after

    def run(self) -> None:
        """Train all remaining steps."""
        planned = self.inputs.steps[self.state.step : self.end]
        steps = self.setup.train.steps(planned, self.config.seed or 0)
        with Prefetch(steps, self.setup.train.ready(self.config.buffer_batches), Prepared.size) as prepared:
            stream = self.waiting.over(prepared)
            self.stage.progress(self.state.step, self.end)
            while self.state.step < self.end:
                if rank_group.any_rank(self.stage.stop_requested(), self.setup.place.device):
                    self.checkpoints.save(self.state)
                    self.checkpoints.wait()
                    raise StopRequested(f"train_dflash stopped after step {self.state.step} of {self.end}")
                began = time.perf_counter()
                self.one_step(stream)
                self.step_seconds.append(time.perf_counter() - began)
                self.report()

    def one_step(self, stream: Iterator[Prepared]) -> None:
        """Train one global step: forward, backward and update; its row goes into the history.

        Nothing is updated without a weighted slot, or with a loss or gradient that is not finite. The device is read
        once, tally and norm together, which decide about the update.
        """
        step, state, config = self.state.step, self.state, self.config
        state.optimizer.zero_grad(set_to_none=True)
        tally = train_step(self.setup.engine, stream, self.stage.world_size)
        rate = learning_rate(
            step,
            self.total,
            config.lr,
            config.warmup_ratio,
            schedule=config.schedule,
            decay_ratio=config.decay_ratio,
            min_ratio=config.min_lr_ratio,
        )
        norm = gradient_norm(state.model.parameters(), tally.device)
        row = torch.cat((norm.to(torch.float64)[None], tally)).cpu()
        norm, tally = float(row[0]), row[1:]
        if tally[WEIGHT] > 0:
            planned = self.inputs.steps[step]
            if self.nonfinite.accepts(step + 1, mean_loss(tally), norm, lambda: self.inputs.names(planned.samples)):
                limit_gradients(state.model.parameters(), norm, config.grad_clip)
                set_rate(state.optimizer, rate)
                state.optimizer.step()
                if state.ema is not None:
                    state.ema.update()
            else:
                norm = 0.0
                tally[[LOSS, WEIGHT]] = 0
                tally[HEAD:] = 0
        state.history.append(torch.cat((torch.tensor([rate, norm], dtype=torch.float64), tally)))

    def report(self) -> None:
        """Log, measure and save after a step, each if it is due."""
        step, total, config = self.state.step, self.total, self.config
        if step % config.log_every == 0 or step == self.end:
            self._log(self.state.history[(step - 1) // config.log_every * config.log_every :])
        paused = time.perf_counter()
        due = bool(config.eval_every and step % config.eval_every == 0 and step < total)
        metric = self.measuring.measure() if due else None
        if step < total and (due or step % config.checkpoint_every == 0):
            self.checkpoints.save(self.state, metric)
        self.logged_at += time.perf_counter() - paused
        self.stage.progress(step, self.end)

    def finish(self) -> None:
        """Measure the last step, and write the artifact with the weights of the selected one (only rank 0 writes).

        Raises DataError if no step changed the weights.
        """
        applied = int((torch.stack(self.state.history)[:, TALLY + WEIGHT] > 0).sum())
        warning = self.nonfinite.check_applied(self.end, applied)
        if self.config.pause_after is not None:
            self._pause()
        elif row_of(self.state.measured, self.state.step) is None:
            self.measuring.measure()
        selected = self.measuring.selected()
        weights = self.measuring.weights_of(selected, self.checkpoints)
        if self.stage.rank:
            return
        if warning is not None:
            self.stage.warn(warning)
        if self.pool is not None and self.step_seconds:
            self.stage.info(self.pool.balance(self.waiting.share_after_first()))
        if self.config.select != "last":
            self.measuring.log_selected(selected)
        write_result(self.config, self.stage, self.inputs, self.state, weights, selected)
        measurements = {
            "steps_in_this_attempt": self.state.step - self.first_step,
            "step_seconds": median(self.step_seconds) if self.step_seconds else None,
            **self.measuring.measurements(),
        }
        write_json(self.stage.out_dir / "measurements.json", measurements)

    def _pause(self) -> None:
        """Measure, and keep the state as it would be at this step without a pause: with this measurement only if the
        whole training measures here too.
        """
        state, step = self.state, self.state.step
        if step < self.total:
            self.checkpoints.save(state)
        if self.measuring.measured_at != step:  # else an attempt before measured it, whose answers are gone
            state.measured[:] = [row for row in state.measured if row["step"] != step]
            self.measuring.measure()
        if step == self.total:
            self.checkpoints.save(state)
        self.checkpoints.wait()
        if not self.stage.rank:
            keep_state(self.stage, step)
            write_answers(self.stage.out_dir, self.measuring.answers)

    def _log(self, rows: list[Tensor]) -> None:
        """Log the rows since the last multiple of log_every; speeds are those of this attempt since its last log."""
        tally = torch.stack(rows)[:, TALLY:].sum(0)
        now = time.perf_counter()
        recent = torch.stack(self.state.history[self.logged_step :])[:, TALLY:].sum(0)
        seconds = now - self.logged_at
        self.logged_at, self.logged_step = now, self.state.step
        place, found = self.setup.place, self.inputs.draft.algorithm.metrics(self.config.needs_teacher)
        peak = matmul_peak(place.device, place.dtype) * self.stage.world_size
        values = {
            **metrics(tally, "train", found),
            "train/lr": float(rows[-1][RATE]),
            "train/grad_norm": float(rows[-1][NORM]),
            "train/anchors": float(tally[ANCHORS]),
            "train/samples_without_anchor": float(tally[ANCHORLESS]),
            "train/nonfinite_steps": float(self.state.counters.get(SKIPPED, 0)),
            "train/tokens_per_second": float(recent[TOKENS]) / seconds,
            "train/anchors_per_second": float(recent[ANCHORS]) / seconds,
            "train/mfu": float(recent[FLOPS]) / seconds / peak,
            "train/wait_share": self.waiting.share(),
            "train/memory_gigabytes": peak_memory(place.device) / 1e9,
            **self.rounding.metrics("train"),
            **({} if self.pool is None else self.pool.metrics()),
        }
        for name, means in slot_means(tally, found).items():
            values |= {f"train/{name}_slot_{slot:02d}": mean for slot, mean in enumerate(means, start=1)}
        self.stage.log(values, self.state.step)
        coarse = self.rounding.warning("feature_dtype of train_dflash")
        if coarse is not None and self.stage.rank == 0 and not self.warned_of_rounding:
            self.stage.warn(coarse)
            self.warned_of_rounding = True
