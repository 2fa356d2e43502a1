"""Report sections of `ingest`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Section, Table, account_sections


def report(folder: Path) -> Sequence[Section]:
    """The report sections of ingested data: the account of samples and, with max_samples, the whole source's."""
    sections = account_sections(folder)
    source = folder / "source.json"
    if source.exists():
        rows = [(category, split, count) for category, of in read_json(source).items() for split, count in of.items()]
        sections.append(Section("the whole source", Table(("category", "split", "usable samples"), rows)))
    return sections
