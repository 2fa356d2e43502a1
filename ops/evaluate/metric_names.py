"""The names of tau and its interval in MLflow, each for exactly one figure."""

from __future__ import annotations

ALL = "all"  # all categories together
RESERVED = {"low", "high", "unclipped", "random", "of"}  # words after "tau_" in the names of other figures


def tau_names(kind: str, category: str) -> tuple[str, str, str]:
    """(tau, low, high): "eval/tau_math", "eval/tau_math_low", "eval/tau_math_high" for kind "eval/tau".

    The name of a category with a reserved word could be that of another figure: it follows a slash, which no
    category contains, as in "eval/tau_of/low", "eval/tau_of_low/low", "eval/tau_of_high/low".
    """
    if category == ALL:
        return kind, f"{kind}_low", f"{kind}_high"
    if RESERVED.isdisjoint(category.split("_")):
        return f"{kind}_{category}", f"{kind}_{category}_low", f"{kind}_{category}_high"
    return f"{kind}_of/{category}", f"{kind}_of_low/{category}", f"{kind}_of_high/{category}"
