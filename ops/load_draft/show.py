"""Report sections of `load_draft`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ops.export_draft.show import report as export_sections
from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, Table, facts


def report(folder: Path) -> Sequence[Section]:
    """The report sections of an imported draft: its shape, its publisher, and what was assumed."""
    imported = read_json(folder / "config.json")["dflow"]["imported"]
    named = {name: imported[name] for name in ("publisher", "source", "revision") if name in imported}
    sections = [*export_sections(folder), Section("origin", facts(named))]
    if imported["assumed"]:
        rows = [(name, json.dumps(value)) for name, value in sorted(imported["assumed"].items())]
        sections.append(Section("left open by its config.json, and assumed", Table(("field", "value"), rows)))
    if imported["notes"]:
        sections.append(
            Section("read otherwise than written", Table(("note",), [(note,) for note in imported["notes"]]))
        )
    return sections
