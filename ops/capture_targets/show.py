"""Report sections of `capture_targets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.lib.data.files import read_json
from ops.lib.report_sections import Account, Section, Table, facts, shard_counts
from ops.lib.target.float8_errors import MOST_BY_ROUNDING, MeanErrors

NOTE = (
    f"The mean over channels. Rounding explains {MOST_BY_ROUNDING:.1%} at most, 2.6% as a rule; more is lost where "
    "some channels are thousands of times as large as others."
)


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
        *_float8(info),
    ]


def _float8(info: Mapping[str, Any]) -> Iterator[Section]:
    """The relative error of float8 at each layer, if the features are float8."""
    rows = MeanErrors.of(info["target_layer_ids"], info["shards"]).named()
    if rows:
        yield Section("float8", Table(("states of", "relative error"), rows), note=NOTE)
