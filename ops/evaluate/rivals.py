"""What `evaluate` measures in place of a draft, since the user has it already. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By the field of `evaluate`, which is its entry in the report too.
RIVALS = {"mtp": "the target's own MTP head", "eagle3": "an EAGLE-3 draft"}


def rival_in(report: Mapping[str, Any]) -> str:
    """What took the place of a draft; empty where none did. report: report.json."""
    if report.get("eagle3"):
        return f"the EAGLE-3 draft {report['eagle3']}"
    return RIVALS["mtp"] if report.get("mtp") else ""
