"""Sections as JSON, from the process of the ops to the one that writes the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ops.lib.report_sections import Account, Body, Chart, Html, Picture, Section, Series, Table

KINDS: dict[str, type[Body]] = {kind.__name__: kind for kind in (Table, Chart, Html, Picture, Account)}


def section_to_json(section: Section, folder: Path) -> dict[str, Any]:
    """Raises TypeError for a body of another kind; a picture's path is relative to the artifact's folder."""
    body = section.body
    kind = type(body).__name__
    if kind not in KINDS:
        raise TypeError(f'section "{section.title}": a body is one of {", ".join(KINDS)}, not {kind}')
    if isinstance(body, Picture):
        path = folder / body.path
        values: dict[str, Any] = {"path": str(path.relative_to(folder) if path.is_relative_to(folder) else path)}
        values["alt"] = body.alt
    elif isinstance(body, Chart):
        values = attrs.asdict(body)
    else:
        values = attrs.asdict(body, recurse=False)
    return {"title": section.title, "note": section.note, "kind": kind, "body": values}


def section_from_json(data: Mapping[str, Any], folder: Path) -> Section:
    values = dict(data["body"])
    if data["kind"] == "Chart":
        values["series"] = [Series(**series) for series in values["series"]]
    if data["kind"] == "Picture":
        values["path"] = folder / values["path"]
    return Section(data["title"], KINDS[data["kind"]](**values), data["note"])
