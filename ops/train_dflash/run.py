"""Train a DFlash draft on captured features: the story of a training, from its inputs to the draft's checkpoint.

The history holds one float64 row a step: learning rate, norm of the gradient, then the step's tally. What is logged
is a function of it, so neither log_every nor checkpoint_every nor a resume changes the result.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from attrs import define
from safetensors.torch import save_file
from torch import Tensor

from dsl.errors import DataError, StopRequested
from dsl.op import op_of
from dsl.stage import Stage
from ops.dflash.anchors import block_weights
from ops.dflash.config import to_serving
from ops.dflash.model import DraftModel
from ops.files import write_json
from ops.optimizer import learning_rate, make_optimizer
from ops.train_dflash import ranks
from ops.train_dflash.batches import BlockMaker
from ops.train_dflash.checkpoint import TrainState, load_checkpoint, save_checkpoint
from ops.train_dflash.figures import accuracy_figure, loss_figure
from ops.train_dflash.inputs import Inputs, open_inputs
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.step import Forward
from ops.train_dflash.tally import ANCHORLESS, ANCHORS, LOSS, TOKENS, WEIGHT, mean_loss, metrics, slot_accuracy

FINAL_STEPS = 50
RATE, NORM, TALLY = 0, 1, 2


def train_dflash(config: TrainDflash, stage: Stage) -> None:
    """Train over the plan of batches and write a DraftCheckpoint; resumes from the newest checkpoint in work_dir.

    Under torchrun the samples of every step are dealt over the ranks, which changes results by rounding only.
    Raises DataError for inputs that do not belong together and for a loss that is not finite, and StopRequested after
    saving when the stage is asked to stop.
    """
    with ranks.joined(stage):
        inputs = open_inputs(config, stage)
        training = _Training.start(config, stage, inputs)
        total = len(inputs.steps)
        while training.state.step < total:
            if ranks.any_rank(stage.stop_requested(), training.device):
                training.save()
                raise StopRequested(f"train_dflash stopped after step {training.state.step} of {total}")
            training.one_step()
            training.report()
        training.write_result()


@define
class _Training:
    config: TrainDflash
    stage: Stage
    inputs: Inputs
    state: TrainState
    forward: Forward
    identity: dict[str, Any]
    device: torch.device
    first_step: int
    started: float
    logged: tuple[float, float]  # when the last report was, and the context tokens since then

    @classmethod
    def start(cls, config: TrainDflash, stage: Stage, inputs: Inputs) -> _Training:
        device = torch.device(stage.device)
        model = DraftModel(inputs.draft)
        model.initialise(config.seed or 0)
        model.to(device)
        state = TrainState(model, make_optimizer(model, config.weight_decay), [])
        identity = _identity(config, stage, inputs)
        load_checkpoint(stage.work_dir, state, identity)
        forward = Forward(
            model=model,
            embed_VM=inputs.embed_VM.to(device),
            head_VM=inputs.head_VM.to(device),
            maker=BlockMaker(
                config.num_anchors, block_weights(config.block_size, config.gamma), inputs.draft.mask_token_id
            ),
            micro_batch_tokens=config.micro_batch_tokens,
            pad_multiple=inputs.pad_multiple,
            rank=stage.rank,
            world_size=stage.world_size,
        )
        now = time.perf_counter()
        return cls(config, stage, inputs, state, forward, identity, device, state.step, now, (now, 0.0))

    def one_step(self) -> None:
        """Forward, backward and update over one global step; its row goes into the history.

        A step without a weighted slot updates nothing. Raises DataError where loss or gradient are not finite.
        """
        step, state, config = self.state.step, self.state, self.config
        planned = self.inputs.steps[step]
        state.optimizer.zero_grad(set_to_none=True)
        tally = self.forward.train(self.inputs.train, planned.samples, seed=config.seed or 0, epoch=planned.epoch)
        rate = learning_rate(step, len(self.inputs.steps), config.lr, config.warmup_ratio)
        norm = 0.0
        if tally[WEIGHT] > 0:
            norm = float(torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.grad_clip))
            if not (math.isfinite(norm) and math.isfinite(tally[LOSS])):
                raise DataError(
                    f"step {step + 1}: loss {mean_loss(tally)} and gradient norm {norm} are not finite; samples of the "
                    f"step (split train): {list(planned.samples)}; the last checkpoint in {self.stage.work_dir} is "
                    "kept. Look for non-finite features in these samples, or lower lr"
                )
            for group in state.optimizer.param_groups:
                group["lr"] = rate
            state.optimizer.step()
        state.history.append(torch.cat((torch.tensor([rate, norm], dtype=torch.float64), tally)))

    def report(self) -> None:
        """Log, measure and save after a step, where it is time to."""
        step, total, config = self.state.step, len(self.inputs.steps), self.config
        since, tokens = self.logged
        self.logged = (since, tokens + float(self.state.history[-1][TALLY + TOKENS]))
        if step % config.log_every == 0 or step == total:
            self._log(self.state.history[(step - 1) // config.log_every * config.log_every :])
        if config.eval_every and step % config.eval_every == 0 and step < total:
            self._measure_val()
        if step % config.checkpoint_every == 0 and step < total:
            self.save()
        self.stage.progress(step, total)

    def save(self) -> None:
        """Save a checkpoint; all ranks wait until it is there."""
        if self.stage.rank == 0:
            save_checkpoint(self.stage.work_dir, self.state, self.identity)
        ranks.wait_for_all()

    def write_result(self) -> None:
        """Measure on the val split, and write the artifact and the figures (rank 0 alone)."""
        val = self._measure_val()
        if self.stage.rank:
            return
        history = torch.stack(self.state.history)
        last = history[-FINAL_STEPS:, TALLY:].sum(0)
        out_dir = self.stage.out_dir
        write_json(out_dir / "config.json", to_serving(self.inputs.draft))
        weights = {name: tensor.cpu().contiguous() for name, tensor in self.state.model.state_dict().items()}
        save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
        result = {
            **{name: artifact.digest for name, artifact in self.stage.inputs.items() if artifact is not None},
            "steps": self.state.step,
            "final_loss": mean_loss(last),
            "final_metrics": metrics(last, "train"),
            "val_metrics": None if val is None else metrics(val, "val"),
            "anchors": int(history[:, TALLY + ANCHORS].sum()),
            "tokens": int(history[:, TALLY + TOKENS].sum()),
            "samples_without_anchor": int(history[:, TALLY + ANCHORLESS].sum()),
            "skipped_steps": int((history[:, TALLY + WEIGHT] == 0).sum()),
        }
        write_json(out_dir / "training.json", result)
        seconds = time.perf_counter() - self.started
        steps = self.state.step - self.first_step
        write_json(out_dir / "measurements.json", {"seconds": seconds, "steps_in_this_attempt": steps})
        self.stage.figure("loss", loss_figure([mean_loss(row[TALLY:]) for row in history]))
        self.stage.figure("accuracy", accuracy_figure(slot_accuracy(last), None if val is None else slot_accuracy(val)))

    def _log(self, rows: list[Tensor]) -> None:
        tally = torch.stack(rows)[:, TALLY:].sum(0)
        now = time.perf_counter()
        since, tokens = self.logged
        self.logged = (now, 0.0)
        values = {
            **metrics(tally, "train"),
            "train/lr": float(rows[-1][RATE]),
            "train/grad_norm": float(rows[-1][NORM]),
            "train/anchors": float(tally[ANCHORS]),
            "train/samples_without_anchor": float(tally[ANCHORLESS]),
            "train/tokens_per_second": tokens / (now - since),
        }
        slots = enumerate(slot_accuracy(tally), start=1)
        self.stage.log(values | {f"train/accuracy_slot_{slot:02d}": share for slot, share in slots}, self.state.step)

    def _measure_val(self) -> Tensor | None:
        """The tally of the val split, logged; None where the features hold no such split."""
        if not len(self.inputs.val):
            return None
        tally = self.forward.measure(self.inputs.val)
        self.stage.log(metrics(tally, "val"), self.state.step)
        return tally


def _identity(config: TrainDflash, stage: Stage, inputs: Inputs) -> dict[str, Any]:
    """What a checkpoint must agree with: the config without neutral fields, the inputs and the draft's shape."""
    fields = op_of(config).fields.values()
    return {
        "config": {entry.name: getattr(config, entry.name) for entry in fields if not entry.neutral},
        "inputs": {name: artifact.digest for name, artifact in stage.inputs.items() if artifact is not None},
        "draft": to_serving(inputs.draft),
    }
