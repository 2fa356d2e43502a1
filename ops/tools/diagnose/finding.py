"""Findings of a diagnosis: one for each usual cause of a low tau."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import asdict, evolve, frozen

TOO_FEW = "too few prompts to distinguish that from chance"
FRACTIONS = {"test": "test_fraction", "val": "val_fraction"}  # fields of ingest, by the split that they fill


@frozen(kw_only=True)
class Finding:
    """One line: what was measured, what is normal and why, and for a cause what to do about it.

    is_cause: it lowers tau, or keeps it low. is_note: no mistake, but worth knowing. gain: the measured rise of tau if
    it is fixed; None if only another training could show it. is_measured: False if something is
    missing, which `measured` then names; needs_prompts: prompts are missing, and the advice says how to get them.
    is_judged: False if it would be a cause, but tau can hardly rise.
    explained_by: another cause to fix first, since this one may only follow from it.
    """

    name: str
    measured: str
    normal: str
    advice: str = ""
    is_cause: bool = False
    is_note: bool = False
    gain: float | None = None
    is_measured: bool = True
    needs_prompts: bool = False
    is_judged: bool = True
    explained_by: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields, without advice if there is nothing to do."""
        return asdict(self) | {"advice": self.advice if self.is_cause or self.is_note or self.needs_prompts else ""}


def unmeasured(name: str, why: str) -> Finding:
    """The finding for a check that could not be made; why: what is missing."""
    return Finding(name=name, measured=why, normal="", is_measured=False)


def too_few(name: str, measured: str) -> Finding:
    """The finding for a check that more prompts could decide."""
    return Finding(name=name, measured=measured, normal="", is_measured=False, needs_prompts=True)


def with_next_step(finding: Finding, wanted: int, found: Mapping[str, int]) -> Finding:
    """The finding with how to get more prompts, if it needs them. found: split -> its prompts, of up to `wanted`."""
    if not finding.needs_prompts or finding.advice:
        return finding
    steps = []
    for split in (split for split, count in found.items() if count < wanted):
        raised = f"raise {FRACTIONS[split]} of ingest, or " if split in FRACTIONS else ""
        steps.append(f"the split {split} has only {found[split]} samples: {raised}add samples to the data")
    again = "; ".join(steps) + ", and run the pipeline again"
    return evolve(finding, advice=again if steps else "diagnose with more prompts (--prompts)")


def unjudged(finding: Finding) -> Finding:
    """The finding at a tau that is at its ceiling, where a cause of a low tau explains nothing."""
    return evolve(finding, is_cause=False, is_judged=not finding.is_cause)


def held_back(finding: Finding, why: str) -> Finding:
    """A cause that is not certain yet: reported as unmeasured."""
    return unmeasured(finding.name, f"{finding.measured}; {why}") if finding.is_cause else finding


def unless_chance(finding: Finding) -> Finding:
    """A cause that more prompts may confirm: reported as unmeasured."""
    return too_few(finding.name, f"{finding.measured}; {TOO_FEW}") if finding.is_cause else finding


def sorted_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Causes first, by their gain in tau, then those without a known gain, then those that
    another cause explains; then notes; unjudged and unmeasured findings last.
    """
    return sorted(findings, key=_rank)


def _rank(finding: Finding) -> tuple[bool | float, ...]:
    weight = -(finding.gain or 0.0) if finding.is_cause else 0.0
    open_ends = (not finding.is_measured, not finding.is_judged, bool(finding.explained_by))
    return not finding.is_cause, not finding.is_note, *open_ends, weight
