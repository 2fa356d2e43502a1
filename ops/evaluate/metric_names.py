"""The names of tau and its interval in MLflow, each for exactly one figure."""

from __future__ import annotations

ALL = "all"  # all categories together
TAKEN = {"low", "high", "unclipped", "random", "of"}  # words that stand behind "tau_" in the names of other figures


def tau_names(kind: str, category: str) -> tuple[str, str, str]:
    """(tau, low, high): "eval/tau_math", "eval/tau_math_low", "eval/tau_math_high" for kind "eval/tau".

    A category of which a word is that of a figure would take another's name: it stands behind a slash, which no
    category holds, as "eval/tau_of/low", "eval/tau_of_low/low", "eval/tau_of_high/low".
    """
    if category == ALL:
        return kind, f"{kind}_low", f"{kind}_high"
    if TAKEN.isdisjoint(category.split("_")):
        return f"{kind}_{category}", f"{kind}_{category}_low", f"{kind}_{category}_high"
    return f"{kind}_of/{category}", f"{kind}_of_low/{category}", f"{kind}_of_high/{category}"
