"""Sections that several ops show of their artifacts."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.sample_account import NOT_TAKEN
from ops.lib.report_sections import Account, Cell, Section, Series, Table

DROPPED_SHOWN = 20
ROWS_READ = 50_000  # of samples.jsonl: a report must not take minutes
BINS = 16
DIGEST = re.compile(r"[0-9a-f]{64}")


def account_sections(folder: Path) -> list[Section]:
    """What a data op kept and dropped, and the first of those that it dropped for a fault of theirs."""
    summary = read_json(folder / "summary.json")
    account = Account(came_in=summary["in"], kept=summary["splits"], dropped=summary["dropped"])
    sections = [Section("samples", account)]
    with (folder / "dropped.csv").open(encoding="utf-8", newline="") as file:
        header, *at_fault = (row for row in csv.reader(file) if len(row) > 1 and row[1] != NOT_TAKEN)
    rows = at_fault[:DROPPED_SHOWN]
    if rows:
        total = len(at_fault)
        note = f"the first {len(rows)} of {total}; all are in dropped.csv" if total > len(rows) else ""
        sections.append(Section("dropped samples", Table(header, rows), note))
    return sections


def facts(values: Mapping[str, Any], names: Sequence[str] = ()) -> Table:
    """A row for each value, or for those named that are there."""
    chosen = {name: values[name] for name in names if name in values} if names else values
    return Table(("", ""), [(name, shown_value(value)) for name, value in chosen.items()])


def shown_value(value: Any) -> Cell:
    """A value of a JSON file as a cell: numbers and texts as they are, digests by their beginning."""
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value[:12]
    if value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)


def shard_counts(shards: Iterable[Mapping[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Samples and tokens by split, of the entries of tokens.json or features.json."""
    samples: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for shard in shards:
        samples[shard["split"]] += shard["samples"]
        tokens[shard["split"]] += shard["tokens"]
    return samples, tokens


def first_rows(file: Path) -> list[dict[str, Any]]:
    """As many as a report takes the time for."""
    return list(islice(read_jsonl(file), ROWS_READ))


def histogram(name: str, values: Sequence[float]) -> Series:
    """How many values lie in each of some bins of one width; x is where a bin begins."""
    low, high = min(values), max(values)
    width = max(1, -(-(int(high) - int(low) + 1) // BINS))
    counts = Counter((int(value) - int(low)) // width for value in values)
    bins = range(max(counts) + 1)
    return Series(name, [int(low) + place * width for place in bins], [counts[place] for place in bins])
