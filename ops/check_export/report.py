"""Report sections of `check_export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, Table, facts


def report(folder: Path) -> Sequence[Section]:
    """The checks that passed, and tau as evaluated and as served by SGLang."""
    check = read_json(folder / "check.json")
    live = {f"live: {name}": value for name, value in check["live"].items()}
    sections = [Section("gate", facts({"static": check["static"], **live}))]
    served = check["tau"].get("served") or {}
    rows = [(category, tau, served.get(category)) for category, tau in check["tau"]["evaluate"].items()]
    sections.append(Section("tau", Table(("category", "evaluate", "served by SGLang"), rows)))
    if check["warnings"]:
        sections.append(Section("warnings of the gate", Table(("warning",), [(text,) for text in check["warnings"]])))
    return sections
