"""Report sections of a trained target: those of a loaded one, the samples of its accuracy, and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.finetune_vlm.verdicts import verdicts
from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, facts
from ops.load_target.show import report as report_of_target


def report(folder: Path) -> Sequence[Section]:
    """The target, the measurements of its training, and whether it is better than before."""
    file = folder / "measurements.json"  # not a part of the artifact's content
    measured = read_json(file) if file.exists() else {}
    compared = facts(measured, ("test_samples", "majority_share"))
    return [
        *report_of_target(folder),
        Section("compared answers", compared, "samples of the split test whose answer is compared with the label"),
        *verdicts(read_json(folder / "metrics.json"), measured),
    ]
