"""The order in which the metrics of a run are shown, everywhere: first those by which its result is judged."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

# What the built-in ops are judged by, where the ops of a run are not loaded.
JUDGED = frozenset({"eval/tau"})


def figures_in_order(names: Iterable[str], judged: Collection[str] = JUDGED) -> list[str]:
    """What is judged by (`eval/tau`), its parts (`eval/tau_image`), all others; of each those with an interval come
    first, and then it goes by name.

    names: the ends of intervals, `x_low` and `x_high`, included. Each may have a node as prefix: `eval_long/eval/tau`.
    """
    known = set(names)

    def place(name: str) -> tuple[int, bool, str]:
        return _rank(name, judged), not {f"{name}_low", f"{name}_high"} <= known, name

    return sorted(known, key=place)


def is_judged(name: str, judged: Collection[str] = JUDGED) -> bool:
    return any(f"/{name}".endswith(f"/{each}") for each in judged)


def _rank(name: str, judged: Collection[str]) -> int:
    if is_judged(name, judged):
        return 0
    return 1 if any(f"/{each}_" in f"/{name}" for each in judged) else 2


def is_main(name: str, main_figures: str) -> bool:
    """Whether it is one of an op's main figures or an end of its interval; it may have a node as prefix."""
    return not main_figures or re.fullmatch(rf"(.+/)?({main_figures})(_low|_high)?", name) is not None
