"""Report sections of `shard_sequence`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.data.files import read_json
from ops.lib.report_sections import Account, Chart, Section, Series, facts, first_rows


def report(folder: Path) -> Sequence[Section]:
    """The plan of batches, and how full its steps are."""
    plan = read_json(folder / "plan.json")
    steps = first_rows(folder / "steps.jsonl")
    full = Series("tokens of a step", [step["step"] for step in steps], [step["tokens"] for step in steps])
    account = Account(came_in=plan["samples"], kept={plan["split"]: plan["samples"]}, splits=(plan["split"],))
    return [
        Section("samples", account),
        Section("plan", facts(plan)),
        Section("tokens of the steps", Chart([full], "step", "padded tokens")),
    ]
