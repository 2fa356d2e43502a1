"""Report sections of `load_target` and `finetune_vlm`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, Table, facts
from ops.lib.target.probed import kept_probes


def report(folder: Path) -> Sequence[Section]:
    """The report sections of a target: facts, and the measurements of its training."""
    sections = [Section("target", facts(read_json(folder / "target.json")))]
    for probe in kept_probes(folder):
        rows = [[name, found, what] for name, found, what in probe.rows()]
        sections.append(Section(f"measured on {probe.on}", Table(["check", "result", "what"], rows)))
    metrics = read_json(folder / "metrics.json")
    if metrics:
        sections.append(Section("measured", facts(metrics)))
    return sections
