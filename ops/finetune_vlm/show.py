"""Report sections of a trained target: those of a loaded one, the samples of its accuracy, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from dsl.finding import Finding
from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, facts, verdict
from ops.load_target.show import report as report_of_target


def report(folder: Path) -> Sequence[Section]:
    """The report sections of a fine-tuned target: facts, measurements of its training, and verdicts."""
    file = folder / "measurements.json"  # not a part of the artifact's content
    measured = read_json(file) if file.exists() else {}
    compared = facts(measured, ("test_samples", "majority_share"))
    return [
        *report_of_target(folder),
        Section("compared answers", compared, "samples of the split test whose answer is compared with the label"),
        *verdicts(read_json(folder / "metrics.json"), measured),
    ]


NORMAL_95 = 1.959964  # quantile of the normal distribution for a two-sided interval of 95 %
LEARN_MORE = "train longer or with a higher lr (steps, lr of finetune_vlm), on more samples"
TEST_MORE = "compare more answers: raise test_fraction of ingest, or eval_samples of finetune_vlm"
NO_TEST = "measure it: metric of finetune_vlm, and samples with a label in the split test"


def verdicts(metrics: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[Section]:
    """The verdict sections of a fine-tuned target. metrics: metrics.json. measured: measurements.json,
    empty if gone.
    """
    if "accuracy" not in metrics:
        yield Section("accuracy", verdict("target", "not measured: accuracy on the split test", "info", NO_TEST))
        return
    yield Section("accuracy", _against_before(metrics, measured.get("test_samples")))
    if measured.get("majority_share") is not None:
        yield Section("majority class", _against_majority(metrics["accuracy"], measured))


def wilson(share: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share of independent samples (Wilson's score interval)."""
    z = NORMAL_95
    middle = share + z**2 / (2 * samples)
    half = z * sqrt(share * (1 - share) / samples + z**2 / (4 * samples**2))
    scale = 1 + z**2 / samples
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def _against_before(metrics: Mapping[str, Any], samples: int | None) -> Finding:
    after, before = metrics["accuracy"], metrics.get("accuracy_before")
    text = f"accuracy on test {_shown(after, samples)}"
    if before is None:
        return verdict("target", f"{text}; the training began with random weights, so there is none before it")
    text += f"; before the training {_shown(before, samples)}"
    if after <= before:
        return verdict("target", f"{text}. It did not rise", "error", LEARN_MORE)
    if samples is None:
        return verdict("target", f"{text}. It rose; of how many samples is not recorded", "warning")
    if wilson(after, samples)[0] > wilson(before, samples)[1]:
        return verdict("target", f"{text}. It rose", "good")
    return verdict("target", f"{text}. It rose, but the intervals overlap: that may be chance", "warning", TEST_MORE)


def _against_majority(accuracy: float, measured: Mapping[str, Any]) -> Finding:
    samples, share = measured["test_samples"], measured["majority_share"]
    text = f"the most frequent label is that of {share:.1%} of the {samples:,} samples"
    low = wilson(accuracy, samples)[0]
    if low > share:
        return verdict("target", f"{text}: the accuracy, {_shown(accuracy, samples)}, is above it", "good")
    if accuracy > share:
        text = f"{text}: the accuracy, {_shown(accuracy, samples)}, is not certainly above it"
        return verdict("target", text, "warning", TEST_MORE)
    text = f"{text}: always answering it would be right as often as the target, {_shown(accuracy, samples)}"
    return verdict("target", text, "error", LEARN_MORE)


def _shown(share: float, samples: int | None) -> str:
    if samples is None:
        return f"{share:.1%}"
    low, high = wilson(share, samples)
    return f"{share:.1%} of {samples:,} samples (95 %: {low:.1%} to {high:.1%})"
