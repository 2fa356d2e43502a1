"""Train a target on the tokenised samples: AdamW on the answers' tokens, warm-up and cosine decay.

The loss of a step is the mean cross-entropy over the answer tokens of all its samples, on all ranks: each rank
backpropagates world_size * (its sum) / (all answer tokens), and gradients are averaged over the ranks. So neither the
number of ranks nor the cut into forward passes changes more than the rounding.

The history holds one float64 row a step. The order of the samples is a function of the seed and the epoch. So a resumed
training goes on exactly where it was, and neither log_every, eval_every nor checkpoint_every changes the result.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from transformers import AutoTokenizer

from dsl.errors import DataError, StopRequested
from dsl.op import op_of
from dsl.stage import Stage
from ops.files import write_json
from ops.finetune_vlm.accuracy import Metric, count_right, measurable
from ops.finetune_vlm.batches import Order, micro_batches
from ops.finetune_vlm.figures import training_figure
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.parts import SEEING, Part, clip_gradients, freeze, make_optimizer, parts_of, set_rates
from ops.finetune_vlm.saving import save_target, saved_for_now, whole_target
from ops.finetune_vlm.start import start_target
from ops.load_target.model import Target, describe_target
from ops.load_target.save import CODE, PROCESSOR, copy_files, write_target_json
from ops.optimizer import learning_rate
from ops.sequence_parallel.target import ParallelTarget, answer_tokens
from ops.tokenize_chat.shards import TokenReader
from ops.training import ranks
from ops.training.background import Checkpoints
from ops.training.checkpoint import Kept, TrainState
from ops.training.nonfinite import SKIPPED, NonFinite
from ops.vision.batch import ModelInputs, collate

RATE, NORM, LOSS, ANSWERS, TOKENS, VAL_LOSS, VAL_ACCURACY = range(7)


def finetune_vlm(config: FinetuneVlm, stage: Stage) -> None:
    """Write the TargetModel artifact; resumes from the newest checkpoint in work_dir.

    Under torchrun every step's samples are dealt over the dp ranks, and each sequence over the sp ranks. Raises
    DataError for tokens that do not fit the target and for losses that stay non-finite, ConfigError for fields or a
    mesh that do not fit it, and StopRequested after saving when the stage is asked to stop.
    """
    with ranks.joined(stage):
        kept = Kept(last=config.keep_checkpoints)
        with Checkpoints(stage.work_dir, _identity(config, stage), rank=stage.rank, kept=kept) as checkpoints:
            training = _Training.start(config, stage, checkpoints)
            training.run()
            training.write_result()


@define
class _Training:
    config: FinetuneVlm
    stage: Stage
    reader: TokenReader
    val: TokenReader
    source: Path | None
    parallel: ParallelTarget
    parts: dict[str, Part]
    order: Order
    checkpoints: Checkpoints
    state: TrainState
    nonfinite: NonFinite
    started: float = field(factory=time.perf_counter)
    logged_at: float = field(factory=time.perf_counter)
    logged_step: int = 0
    first_step: int = 0

    @classmethod
    def start(cls, config: FinetuneVlm, stage: Stage, checkpoints: Checkpoints) -> _Training:
        reader = TokenReader(stage.inputs["tokens"], "train")
        if not len(reader):
            raise DataError("the train split holds no samples: nothing to train the target on")
        target, source = start_target(config, reader, stage.device if stage.world_size == 1 else "cpu")
        freeze(config, target)
        parts = parts_of(target)
        parallel = _parallel(config, stage, target)
        model = target.model.train()
        state = TrainState(model, make_optimizer(config, model, parts), [])
        checkpoints.load(state)
        return cls(
            config=config,
            stage=stage,
            reader=reader,
            val=TokenReader(stage.inputs["tokens"], "val"),
            source=source,
            parallel=parallel,
            parts=parts,
            order=Order(_lengths(reader), config.seed or 0, config.batch_size, config.batch_tokens),
            checkpoints=checkpoints,
            state=state,
            nonfinite=NonFinite(config.max_nonfinite, stage.work_dir, state.counters),
            logged_step=state.step,
            first_step=state.step,
        )

    def run(self) -> None:
        """All steps that are left."""
        while self.state.step < self.config.steps:
            if ranks.any_rank(self.stage.stop_requested(), self.parallel.device):
                self.checkpoints.save(self.state)
                self.checkpoints.wait()
                raise StopRequested(
                    f"fine-tuning stopped after step {self.state.step} of {self.config.steps}; its progress is saved"
                )
            self.one_step()
            self.report()

    def one_step(self) -> None:
        """Forward, backward and update over one global step; its row goes into the history.

        A step without an answer token, or with a loss or gradient that is not finite, updates nothing.
        """
        config, optimizer = self.config, self.state.optimizer
        samples = self.order.samples(self.state.step + 1)
        passes = self._passes(self.reader, samples)
        answers, images = self._totals(passes)
        optimizer.zero_grad(set_to_none=True)
        loss_sum = self._backward(passes, answers) if answers else 0.0
        if not images:
            self._forget_unseen()
        norm = clip_gradients(self.state.model, config.grad_clip)
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

    def _passes(self, reader: TokenReader, samples: list[int]) -> list[ModelInputs | None]:
        """The batches of this rank's forward passes over some samples; None where it has none left."""
        cut = micro_batches(
            samples,
            _lengths(reader),
            self.config.micro_batch_tokens,
            self.stage.rank // self.stage.sp_degree,
            self.stage.world_size // self.stage.sp_degree,
        )
        return [collate([reader.sample(index) for index in batch]) if batch else None for batch in cut]

    def _totals(self, passes: list[ModelInputs | None]) -> tuple[int, int]:
        """Answer tokens and batches with images, on all ranks."""
        own = [batch for batch in passes if batch is not None and self.parallel.sp_rank == 0]
        counts = [sum(answer_tokens(batch) for batch in own), sum(batch.has_images for batch in own)]
        answers, images = ranks.summed(torch.tensor(counts, device=self.parallel.device)).tolist()
        return answers, images

    def _backward(self, passes: list[ModelInputs | None], answers: int) -> float:
        """Add up the gradients of all passes; the global sum of the loss."""
        total = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        self.parallel.hold()
        for number, batch in enumerate(passes, start=1):
            if number == len(passes):
                self.parallel.release()
            loss = self.parallel.answer_loss(batch)
            (loss * (self.stage.world_size / answers)).backward()
            total += loss.detach()
        return float(ranks.summed(total))

    def _forget_unseen(self) -> None:
        """A step without an image leaves the vision tower as it is.

        One process has no gradients there; the image of weight zero that ranks run would give zeros, which weight
        decay and AdamW's moments do not take for none.
        """
        for name, parameter in self.state.model.named_parameters():
            if self.parts[name] in SEEING:
                parameter.grad = None

    def report(self) -> None:
        """Log, measure and save after a step, where it is time to."""
        step, config = self.state.step, self.config
        if step % config.log_every == 0 or step == config.steps:
            self._log(self.state.history[(step - 1) // config.log_every * config.log_every :])
        paused = time.perf_counter()
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            with saved_for_now(self.parallel, self.stage.work_dir / "measured") as saved:
                self._measure_val(saved)
        if step < config.steps and step % config.checkpoint_every == 0:
            self.checkpoints.save(self.state)
        self.logged_at += time.perf_counter() - paused
        self.stage.progress(step, config.steps)

    def write_result(self) -> None:
        """Write the artifact, and measure it on the val and test splits; rank 0 alone writes."""
        directory = self.stage.out_dir / "model"
        save_target(self.parallel, directory)
        metrics = self._measure_val(directory)
        accuracy = self._accuracy(TokenReader(self.stage.inputs["tokens"], "test"), directory)
        if accuracy is not None:
            metrics["target/accuracy"] = accuracy
            self.stage.log({"target/accuracy": accuracy}, step=self.state.step)
        if self.stage.rank:
            return
        copy_files(self.stage.inputs["tokens"].path / "processor", directory, PROCESSOR)
        if self.source is not None and self.config.trust_remote_code:
            copy_files(self.source, directory, CODE)
        info = describe_target(
            directory,
            self.reader.info["mask_token_id"],
            self.reader.info["eos_token_ids"],
            trust_remote_code=self.config.trust_remote_code,
        )
        figures = {name.removeprefix("target/"): value for name, value in metrics.items()}
        figures["nonfinite_steps"] = self.state.counters.get(SKIPPED, 0)
        write_target_json(self.stage.out_dir, info, figures)
        measured = {
            "seconds": time.perf_counter() - self.started,
            "steps_in_this_attempt": self.state.step - self.first_step,
        }
        write_json(self.stage.out_dir / "measurements.json", measured)
        history = torch.stack(self.state.history)
        losses = (history[:, LOSS] / history[:, ANSWERS]).tolist()
        self.stage.figure(
            "training", training_figure(losses, history[:, VAL_LOSS].tolist(), history[:, VAL_ACCURACY].tolist())
        )

    def _log(self, rows: list[Tensor]) -> None:
        """The rows since the last multiple of log_every; the speed is that of this attempt since its last log."""
        now = time.perf_counter()
        recent = torch.stack(self.state.history[self.logged_step :])[:, TOKENS].sum()
        seconds = now - self.logged_at
        self.logged_at, self.logged_step = now, self.state.step
        sums = torch.stack(rows).sum(0)
        values = {
            "target/lr": float(rows[-1][RATE]),
            "target/grad_norm": float(rows[-1][NORM]),
            "target/nonfinite_steps": float(self.state.counters.get(SKIPPED, 0)),
            "target/tokens_per_second": float(recent) / seconds,
        }
        if sums[ANSWERS]:
            values["target/loss"] = float(sums[LOSS] / sums[ANSWERS])
        self.stage.log(values, self.state.step)

    def _measure_val(self, saved: Path) -> dict[str, float]:
        """Loss and accuracy on the val split, where it holds samples; logged, and kept in the history."""
        metrics = {}
        row = self.state.history[-1]
        loss, accuracy = self._val_loss(), self._accuracy(self.val, saved)
        if loss is not None:
            row[VAL_LOSS] = metrics["target/val_loss"] = loss
        if accuracy is not None:
            row[VAL_ACCURACY] = metrics["target/val_accuracy"] = accuracy
        if metrics:
            self.stage.log(metrics, self.state.step)
        return metrics

    @torch.no_grad()
    def _val_loss(self) -> float | None:
        """Mean cross-entropy per answer token; None without one."""
        if not len(self.val):
            return None
        self.state.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.parallel.device)
        for batch in self._passes(self.val, list(range(len(self.val)))):
            sums[0] += self.parallel.answer_loss(batch)
            if batch is not None and self.parallel.sp_rank == 0:
                sums[1] += answer_tokens(batch)
        self.state.model.train()
        loss, answers = ranks.summed(sums).tolist()
        return loss / answers if answers else None

    def _accuracy(self, reader: TokenReader, saved: Path) -> float | None:
        """Share of right answers, each rank decoding a part; None where nothing can be measured."""
        config, stage = self.config, self.stage
        metric = Metric(config.metric, config.pattern)
        indices = measurable(reader, metric, config.eval_samples)
        if not indices:
            return None
        tokenizer = AutoTokenizer.from_pretrained(reader.tokens.path / "processor")
        own = indices[stage.rank :: stage.world_size]
        with whole_target(self.parallel, saved) as target:
            right = count_right(
                target,
                reader,
                own,
                metric,
                lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                config.max_new_tokens,
                config.micro_batch_tokens,
                lambda done: stage.progress(done, len(own)),
            )
        return int(ranks.summed(torch.tensor(right, device=self.parallel.device))) / len(indices)


def _parallel(config: FinetuneVlm, stage: Stage, target: Target) -> ParallelTarget:
    return ParallelTarget.make(
        target,
        world_size=stage.world_size,
        rank=stage.rank,
        sp_degree=stage.sp_degree,
        device=torch.device("cuda", torch.cuda.current_device()) if stage.device == "cuda" else stage.device,
        dtype=getattr(torch, config.dtype),
        gradient_checkpointing=config.gradient_checkpointing,
    )


def _lengths(reader: TokenReader) -> list[int]:
    return [record["tokens"] for record in reader.records]


def _identity(config: FinetuneVlm, stage: Stage) -> dict[str, Any]:
    """What a checkpoint must agree with: the config without neutral fields, and the tokens."""
    fields = op_of(config).fields.values()
    values = {entry.name: getattr(config, entry.name) for entry in fields if not entry.neutral}
    return json.loads(json.dumps({"config": values, "tokens": stage.inputs["tokens"].digest}))
