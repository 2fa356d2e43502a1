"""Report sections of `shard_sequence`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Account, Section, facts, first_rows, spread


def report(folder: Path) -> Sequence[Section]:
    """The report sections of a batch plan: its facts, and how full its steps are."""
    plan = read_json(folder / "plan.json")
    steps = first_rows(folder / "steps.jsonl")
    account = Account(came_in=plan["samples"], kept={plan["split"]: plan["samples"]}, splits=(plan["split"],))
    return [
        Section("samples", account),
        Section("plan", facts(plan)),
        Section("padded tokens of a step", spread([step["tokens"] for step in steps])),
    ]
