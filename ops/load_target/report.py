"""What `load_target` and `finetune_vlm` show of the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, facts


def report(folder: Path) -> Sequence[Section]:
    """What the target is, and what was measured while it was made."""
    sections = [Section("target", facts(read_json(folder / "target.json")))]
    metrics = read_json(folder / "metrics.json")
    if metrics:
        sections.append(Section("measured", facts(metrics)))
    return sections
