"""The artifact of a training: the draft's config and weights, what was trained and measured, and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import torch
from attrs import has
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor

from dsl.convert import unstructure
from dsl.op import op_of
from dsl.stage import Stage
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.training.checkpoint import TrainState
from ops.lib.training.nonfinite import SKIPPED
from ops.train_dflash.inputs import Inputs
from ops.train_dflash.measuring import metrics_of, row_of
from ops.train_dflash.op import PAUSE, TrainDflash
from ops.train_dflash.tally import ANCHORLESS, ANCHORS, TOKENS, WEIGHT, mean_loss, metrics, slot_accuracy
from ops.train_dflash.verdicts import PARTS

FINAL_STEPS = 50  # at most, unless the split val has more tokens
RATE, NORM, TALLY = 0, 1, 2


def write_result(
    config: TrainDflash,
    stage: Stage,
    inputs: Inputs,
    state: TrainState,
    weights: Mapping[str, Tensor],
    selected: int,
) -> None:
    """Write the DraftCheckpoint except measurements.json. weights: those of the step `selected`."""
    history = torch.stack(state.history)
    val_tokens = sum(inputs.val.lengths)
    final_steps, selected_steps = (window(history[:step], val_tokens) for step in (state.step, selected))
    last = history[-final_steps:, TALLY:].sum(0)
    found = inputs.draft.algorithm.metrics(config.needs_teacher)
    row = row_of(state.measured, selected)
    write_json(stage.out_dir / "config.json", to_serving(inputs.draft))
    save_file(dict(weights), stage.out_dir / "model.safetensors", metadata={"format": "pt"})
    result = {
        **_input_digests(stage),
        "captured": inputs.captured,
        "steps": state.step,
        "selected_step": selected,
        "measured": state.measured,
        "loss": config.loss,
        "recipe": key_fields(config),
        "samples": len(inputs.train),
        "samples_seen": len({sample for step in inputs.steps[: state.step] for sample in step.samples}),
        "final_steps": final_steps,
        "final_loss": mean_loss(last),
        "final_metrics": metrics(last, "train", found),
        "selected_steps": selected_steps,
        "selected_metrics": metrics(history[selected - selected_steps : selected, TALLY:].sum(0), "train", found),
        "val_metrics": None if row is None else metrics_of(row),
        "anchors": int(history[:, TALLY + ANCHORS].sum()),
        "tokens": int(history[:, TALLY + TOKENS].sum()),
        "samples_without_anchor": int(history[:, TALLY + ANCHORLESS].sum()),
        "skipped_steps": int((history[:, TALLY + WEIGHT] == 0).sum()),
        "nonfinite_steps": state.counters.get(SKIPPED, 0),
    }
    write_json(stage.out_dir / "training.json", result)
    stage.figure("loss", loss_figure([mean_loss(step[TALLY:]) for step in history]))
    of_val = None if row is None else row.get("accuracy_by_slot")
    stage.figure("accuracy", accuracy_figure(slot_accuracy(last, found), of_val))
    taus = [(row["step"], row["tau"]["all"]) for row in state.measured if "tau" in row]
    if any(tau["tau"] is not None for _, tau in taus):
        stage.figure("tau", tau_figure(taus, selected, inputs.draft.block_size))


def window(history: Tensor, val_tokens: int) -> int:
    """The number of last steps whose means are shown beside figures of the split val.

    They are the last part of the training, at most FINAL_STEPS, but at least as many tokens as val has. In earlier
    steps the draft was worse.
    """
    tokens = history[:, TALLY + TOKENS].flip(0).cumsum(0)
    as_many = int((tokens < val_tokens).sum()) + 1
    return min(len(history), max(as_many, min(FINAL_STEPS, ceil(len(history) / PARTS))))


def identity(config: TrainDflash, stage: Stage, inputs: Inputs) -> dict[str, Any]:
    """The facts that a checkpoint must match: the config without neutral fields, the inputs and the draft's shape."""
    return {
        "config": key_fields(config),
        "inputs": _input_digests(stage),
        "captured": inputs.captured,
        "draft": to_serving(inputs.draft),
    }


def _input_digests(stage: Stage) -> dict[str, str]:
    """The digests of the inputs that are given, without the training that this one continues: it is this training."""
    given = {name: artifact for name, artifact in stage.inputs.items() if name != "continues"}
    return {name: artifact.digest for name, artifact in given.items() if artifact is not None}


def key_fields(config: TrainDflash) -> dict[str, Any]:
    """The config without its neutral fields, and without the pause, as JSON values."""
    kept = [entry.name for entry in op_of(config).fields.values() if not entry.neutral and entry.name != PAUSE]
    fields = {name: getattr(config, name) for name in kept}
    return {name: unstructure(value) if has(type(value)) else value for name, value in fields.items()}


def loss_figure(losses: Sequence[float]) -> Figure:
    """A figure of the loss of every step."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", title="Loss of the draft")
    return figure


def accuracy_figure(train: Sequence[float], val: Sequence[float] | None) -> Figure:
    """A figure of the accuracy of slots 1..K-1 over the last steps and, if measured, on the val split."""
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
    """A figure of tau on the split val over the steps, with the step whose weights are exported.

    A single prompt has no interval.
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
