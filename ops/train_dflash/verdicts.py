"""What a training says of what limits its draft: sentences for the first screen of the report. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsl.finding import Finding
from ops.lib.report_sections import Section, verdict
from ops.lib.training.nonfinite import SkippedSteps

PARTS = 5  # of a training: a step before the last part is an early one
MOST_FALL = 0.1  # of a loss: a larger fall makes the right token over 10 % more likely
LEAST_BETWEEN = 50  # steps between two measurements on val that are worth their cost
GAP_RATIO = 1.5  # of the figure on the training's samples to that on held-out ones, above which they are memorized
LONGER = "train longer: more epochs of shard_sequence, or more samples"
MORE_SAMPLES = "train on more, and more varied, samples like those to be served, for fewer epochs"
NO_VAL = 'measure val while it trains: eval_every of train_dflash, and a captured split "val"'
NO_SPLIT = "raise val_fraction of ingest, and capture the split val too"


def verdicts(training: Mapping[str, Any]) -> Iterator[Section]:
    """The verdict sections of a training. training: training.json."""
    yield Section("length of training", _length(training))
    yield Section("overfitting", _gap(training))
    yield Section("data", _data(training))
    skipped = skipped_steps(training)
    if skipped.are_many:
        yield Section("stability", verdict("limit", skipped.text, "warning", skipped.advice))
    elif skipped.skipped:
        yield Section("stability", verdict("limit", skipped.text))


def skipped_steps(training: Mapping[str, Any]) -> SkippedSteps:
    nonfinite = training.get("nonfinite_steps", 0)
    return SkippedSteps(training["steps"], max(nonfinite, training.get("skipped_steps", 0)), nonfinite)


def exported_metrics(training: Mapping[str, Any]) -> Mapping[str, float] | None:
    """The train/... metrics of the steps before the exported weights; of the last steps without another record."""
    return training.get("selected_metrics") or training.get("final_metrics")


def exported_window(training: Mapping[str, Any]) -> str:
    """A phrase for the steps whose means `exported_metrics` are."""
    steps = training.get("selected_steps")
    return "in training" if steps is None else f"in the last {steps} steps of training"


def is_short(steps: float) -> bool:
    """Whether there are too few steps to show where a loss is heading: measurements would lie too close together."""
    return steps < 2 * LEAST_BETWEEN


def is_before_last_part(step: float, last: float) -> bool:
    return step <= last * (PARTS - 1) / PARTS


def _length(training: Mapping[str, Any]) -> Finding:
    """A finding on whether the val loss was still falling at the end, or has risen since its lowest value."""
    steps = training["steps"]
    curve = [(row["step"], row["loss"]) for row in training.get("measured", ()) if row.get("loss") is not None]
    early = [(step, loss) for step, loss in curve if is_before_last_part(step, steps)]
    if (not early or len(early) == len(curve)) and is_short(steps):
        return verdict(
            "limit", f"not measured: {steps} steps are too few to see the loss on val fall", "warning", LONGER
        )
    if not early or len(early) == len(curve):
        return verdict("limit", f"not measured: the loss on val towards the end of {steps} steps", "warning", NO_VAL)
    final, (lowest, at) = curve[-1][1], min((loss, step) for step, loss in curve)
    if final - lowest > MOST_FALL:
        text = f"the loss on val was lowest at step {at} of {steps}, {lowest:.2f}, and rose to {final:.2f}"
        return verdict("limit", f"{text}: more steps on these samples do not help", "warning", MORE_SAMPLES)
    step, before = early[-1]
    text = f"the loss on val was {before:.2f} at step {step}, and {final:.2f} at the end of {steps} steps"
    if before - final > MOST_FALL:
        return verdict("limit", f"{text}: it was still improving", "warning", LONGER)
    return verdict("limit", f"{text}: it has converged", "good")


def _gap(training: Mapping[str, Any]) -> Finding:
    seen, held_out = exported_metrics(training), training.get("val_metrics") or {}
    if not seen or "val/accuracy" not in held_out:
        return verdict("limit", "not measured: accuracy on the split val", "warning", NO_SPLIT)
    trained, val = seen["train/accuracy"], held_out["val/accuracy"]
    text = f"slots right: {trained:.0%} {exported_window(training)}, {val:.0%} on val"
    if trained > GAP_RATIO * val:
        return verdict("limit", f"{text}: the samples are memorized", "warning", MORE_SAMPLES)
    return verdict("limit", f"{text}: the samples are not memorized", "good")


def _data(training: Mapping[str, Any]) -> Finding:
    samples, tokens = training["samples"], training["tokens"]
    seen = training.get("samples_seen", samples)
    text = f"{tokens:,} tokens in {training['steps']} steps, of {seen:,} samples"
    if seen < samples:
        text += f"; {samples - seen:,} more were in no step before max_steps"
        return verdict("limit", text, "warning", "train on all samples: raise max_steps of train_dflash")
    return verdict("limit", text)
