"""Report sections of `capture_targets`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Account, Section, Table, facts, shard_counts


def report(folder: Path) -> Sequence[Section]:
    """The report sections on which samples were captured, and how."""
    info = read_json(folder / "features.json")
    samples, tokens = shard_counts(info["shards"])
    account = Account(came_in=sum(samples.values()), kept=samples, splits=tuple(samples))
    by_split = [(split, samples[split], tokens[split]) for split in samples]
    named = {name: value for name, value in info.items() if name not in ("shards", "format")}
    return [
        Section("samples", account),
        Section("captured", Table(("split", "samples", "tokens"), by_split)),
        Section("features", facts(named)),
    ]
