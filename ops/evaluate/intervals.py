"""Bootstrap intervals of 95 % from resampled figures, and the names of tau and its interval in MLflow; loads no torch.

R resamplings
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

ALL = "all"  # all categories together
RESERVED = {"low", "high", "unclipped", "random", "of", "group"}  # words after "tau_" in the names of other figures
TABLES = {"context", "turn", "kind", "temperature", "block"}  # first words after "tau_" in the names of parts of tau
UNSAFE = re.compile(r"[^A-Za-z0-9_. -]")
MOST_GROUPS = 50  # that are reported by name
REST, OTHERS = "", "all others"  # the name of all other prompts together, which no group has, and how it is shown
PART_LABELS = {
    "context": "tokens of prompt and answer before the step",
    "turn": "answers before this one",
    "kind": "what the step's first token is part of",
}
LONGEST_CONTEXT = 64  # thousands of tokens at which the last part of the contexts begins
LONGEST_NAME = 100  # characters of a group in the name of a metric
PERCENTILES = (2.5, 97.5)
Z_975 = 1.960


def resampled(count: int, resamplings: int, seed: int) -> np.ndarray:
    """Random indices for bootstrap samples, [R, count], drawn with replacement."""
    return np.random.default_rng(seed).integers(0, count, size=(resamplings, count))


def interval(estimate: float, resampled_R: np.ndarray, count: int) -> tuple[float, float]:
    """A bootstrap interval: the percentiles of the resampled figures, widened since there are few prompts.

    Resampling `count` prompts has too small a spread, by sqrt((count - 1) / count). A spread estimated from few prompts
    also requires Student's t instead of the normal distribution. Source: Hesterberg, What Teachers Should Know About
    the Bootstrap (2015), section 3.4. It is widened here instead of using outer percentiles, which few prompts lack.
    """
    from scipy.special import stdtrit  # slow to import, and rarely needed

    low, high = np.percentile(resampled_R, PERCENTILES)
    wider = float(stdtrit(count - 1, 0.975)) / Z_975 * (count / (count - 1)) ** 0.5
    return float(estimate - wider * (estimate - low)), float(estimate + wider * (high - estimate))


def group_names(group: str) -> tuple[str, str, str]:
    """The names in MLflow of a group's tau and of its interval's ends: "eval/tau_group/math",
    "eval/tau_group_low/math", ....

    A group is any text: one with a character that a name must not have gets the start of its digest, so that no two are
    the same.
    """
    safe = UNSAFE.sub("_", group)
    if safe != group or len(group) > LONGEST_NAME or not group.strip(". "):
        safe = f"{safe[:LONGEST_NAME]}-{sha256(group.encode()).hexdigest()[:8]}"
    return f"eval/tau_group/{safe}", f"eval/tau_group_low/{safe}", f"eval/tau_group_high/{safe}"


def part_names(table: str, part: str) -> tuple[str, str, str]:
    """The names of a part of a table and its interval: "eval/tau_context_04k", "eval/tau_context_04k_low", ....

    table: the report's key, such as "tau_by_context".
    """
    name = f"eval/{table.replace('_by_', '_')}_{part}"
    return name, f"{name}_low", f"{name}_high"


def parted(report: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Those of the tables of PART_LABELS in report.json that have several parts: the parts' labels, in order -> tau."""
    contexts = {context_label(part): tau for part, tau in sorted(report.get("tau_by_context", {}).items())}
    turns = dict(sorted(report.get("tau_by_turn", {}).items(), key=lambda turn: int(turn[0])))
    tables = {"context": contexts, "turn": turns, "kind": report.get("tau_by_kind", {})}
    return {table: parts for table, parts in tables.items() if len(parts) > 1}


def missing_kinds(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each kind of token that samples of the split learn and no answer of the target has a step in."""
    return [
        f"{kind}: no steps; {count} of {report['samples_of_split']} samples of the split have some, and none of the "
        "target's answers, so tau there is not measured"
        for kind, count in report.get("kinds_without_steps", {}).items()
    ]


def context_label(part: str) -> str:
    """The contexts of a part of "tau_by_context" in words: "04k" is "4k to 8k"."""
    thousands = int(part.removesuffix("k"))
    if thousands == LONGEST_CONTEXT:
        return f"from {thousands}k"
    return f"{thousands}k to {2 * thousands}k" if thousands else "below 1k"


def tau_names(kind: str, category: str) -> tuple[str, str, str]:
    """The names of tau and its interval: "eval/tau_math", "eval/tau_math_low", "eval/tau_math_high".

    A category with a reserved word could yield another figure's name. It follows a slash, which no category contains:
    "eval/tau_of/low", "eval/tau_of_low/low", "eval/tau_of_high/low".
    """
    if category == ALL:
        return kind, f"{kind}_low", f"{kind}_high"
    words = category.split("_")
    if RESERVED.isdisjoint(words) and words[0] not in TABLES:
        return f"{kind}_{category}", f"{kind}_{category}_low", f"{kind}_{category}_high"
    return f"{kind}_of/{category}", f"{kind}_of_low/{category}", f"{kind}_of_high/{category}"
