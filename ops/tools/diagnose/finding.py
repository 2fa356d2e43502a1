"""What a diagnosis says: one finding for each usual cause of a low tau."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict, evolve, frozen

TOO_FEW = "too few prompts to tell that from chance: diagnose with more (--prompts)"


@frozen(kw_only=True)
class Finding:
    """One line: what was measured, what is normal and why, and of a cause what to do about it.

    is_cause: it lowers tau, or keeps it low. is_note: no mistake, but worth knowing. gain: by how much tau rises where
    it is put right, as measured; None where only another training could tell. is_measured: False where something is
    missing, which `measured` then says. is_judged: False where it would be a cause, but tau can hardly rise.
    explained_by: the name of another cause that is to be put right first, since this may only follow from it.
    """

    name: str
    measured: str
    normal: str
    advice: str = ""
    is_cause: bool = False
    is_note: bool = False
    gain: float | None = None
    is_measured: bool = True
    is_judged: bool = True
    explained_by: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields, without advice where there is nothing to do."""
        return asdict(self) | {"advice": self.advice if self.is_cause or self.is_note else ""}


def unmeasured(name: str, why: str) -> Finding:
    """Where a check could not be made; why: what is missing."""
    return Finding(name=name, measured=why, normal="", is_measured=False)


def unjudged(finding: Finding) -> Finding:
    """Of a tau at its ceiling: what would explain a low one explains nothing."""
    return evolve(finding, is_cause=False, is_judged=not finding.is_cause)


def held_back(finding: Finding, why: str) -> Finding:
    """A cause that cannot be named yet: told as one that was not measured."""
    return unmeasured(finding.name, f"{finding.measured}; {why}") if finding.is_cause else finding


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Causes first, by how much tau they explain, those that cannot be told in tau behind them, and behind these what
    another cause explains; then notes; what was not judged or not measured last.
    """
    return sorted(findings, key=_rank)


def _rank(finding: Finding) -> tuple[bool | float, ...]:
    weight = -(finding.gain or 0.0) if finding.is_cause else 0.0
    open_ends = (not finding.is_measured, not finding.is_judged, bool(finding.explained_by))
    return not finding.is_cause, not finding.is_note, *open_ends, weight
