"""Evaluations side by side: tau and speed-up of each variant, and how far it is from the first, paired by prompt.

All drafts are measured on the same prompts, so an interval resamples the prompts of all of them together: what makes a
prompt easy for one draft makes it easy for the others, and leaves their difference alone. Drafts that differ in the
seed only are one variant, whose tokens, steps and seconds are summed. Loads no torch.

V variants, N prompts or batches, R resamplings
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ops.evaluate.intervals import ALL, interval, resampled
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.report_sections import Cell, Compared, Section, Table, Variant, variants

RESAMPLINGS, SEED = 2000, 0
FEWEST = 2  # prompts or batches of an interval


@frozen(eq=False)
class Measured:
    """A figure of several variants: values, intervals, and the value of each draft.

    beside: the difference from the first variant, or the ratio to it, with its interval; None for the first.
    """

    values: Sequence[float]
    intervals: Sequence[tuple[float, float] | None]
    beside: Sequence[tuple[float, tuple[float, float] | None] | None]
    each: Sequence[Sequence[float]]


def compare_evaluations(artifacts: Sequence[Compared]) -> Iterator[Section]:
    """Report sections that compare tau and speed-up; for what was measured differently only the reason is shown."""
    found = variants(artifacts)
    yield from _tau(found)
    yield from _speedup(found)


def _tau(found: Sequence[Variant]) -> Iterator[Section]:
    answers = [[answers_of(folder) for folder in variant.folders] for variant in found]
    every = [one for of_variant in answers for one in of_variant]
    common = [id_ for id_ in every[0] if all(id_ in other for other in every)]
    if len(common) < FEWEST:
        yield _missing("tau", "the evaluations have fewer than two prompts in common")
        return
    categories = {id_: every[0][id_][0] for id_ in common}
    rows: list[Sequence[Cell]] = []
    for category in (ALL, *dict.fromkeys(categories.values())):
        chosen = [id_ for id_ in common if category in (ALL, categories[id_])]
        sums = [[[one[id_][1:] for id_ in chosen] for one in of_variant] for of_variant in answers]
        measured = measure_ratios([np.array(each, dtype=np.float64) for each in sums], is_ratio=False)
        if measured is None or (category != ALL and len(chosen) == len(common)):
            continue
        rows += _rows([category, len(chosen)], found, measured)
    others = sum(len(one) for one in every) - len(every) * len(common)
    note = (
        "Tokens per verification step, with 95 % intervals. Those of the difference resample the same prompts of both, "
        "so they may exclude 0 where the intervals of tau overlap. They hold for these drafts: what another seed "
        "changes is in the last column."
    )
    yield Section(
        "tau by prompt",
        Table(
            ("prompts", "number", "draft", "tau", "interval", f"above {found[0].name}", "its interval", "each"), rows
        ),
        note + (f" {others} answers to prompts that not all have are left out." if others else ""),
    )


def _speedup(found: Sequence[Variant]) -> Iterator[Section]:
    times = [[_times(folder) for folder in variant.folders] for variant in found]
    every = [one for of_variant in times for one in of_variant]
    if any(not one for one in every):
        yield _missing("speed-up", "measurements.json of a run is gone, or is of an older version")
        return
    if any(one.keys() != every[0].keys() for one in every) or len(every[0]) < FEWEST:
        yield _missing("speed-up", "the evaluations were not cut into the same batches of prompts, or into one")
        return
    batches = list(every[0])
    sums = [np.array([[one[batch] for batch in batches] for one in of_variant]) for of_variant in times]
    measured = measure_ratios(sums, is_ratio=True)
    assert measured is not None
    columns = (
        "batches",
        "number",
        "draft",
        "speed-up",
        "interval",
        f"times that of {found[0].name}",
        "its interval",
        "each",
    )
    yield Section(
        "speed-up by prompt",
        Table(columns, list(_rows([ALL, len(batches)], found, measured))),
        "Over plain decoding of the same batch directly before or after. Intervals as those of tau.",
    )


def measure_ratios(sums: Sequence[np.ndarray], *, is_ratio: bool) -> Measured | None:
    """The ratio of each variant's sums, with its interval, and compared with the first variant's.

    sums: for each variant, [drafts, N, 2] numerators and denominators, or [drafts, N, 4] those of two ratios, of which
    the first is divided by the second. is_ratio: compare variants by the ratio of their values, not by the difference.
    None where a denominator is 0 for all prompts.
    """
    count = sums[0].shape[1]
    draws_RN = resampled(count, RESAMPLINGS, SEED)
    has_intervals = count >= FEWEST
    values, drawn, each = [], [], []
    for of_variant in sums:
        of_prompt_N = of_variant.sum(0)
        if not of_prompt_N[:, 1].sum():
            return None
        values.append(float(_value(of_prompt_N.sum(0))))
        drawn.append(_value(of_prompt_N[draws_RN].sum(1)) if has_intervals else None)
        each.append([float(_value(one.sum(0))) for one in of_variant])
    beside: list[tuple[float, tuple[float, float] | None] | None] = [None]
    for value, drawn_R in zip(values[1:], drawn[1:], strict=True):
        estimate = value / values[0] if is_ratio else value - values[0]
        if drawn_R is None or drawn[0] is None:
            beside.append((estimate, None))
        else:
            beside.append((estimate, interval(estimate, drawn_R / drawn[0] if is_ratio else drawn_R - drawn[0], count)))
    least = 0.0 if is_ratio else 1.0  # of a tau
    own = [_within(least, value, drawn_R, count) for value, drawn_R in zip(values, drawn, strict=True)]
    return Measured(values, own, beside, each)


def _within(least: float, value: float, drawn_R: np.ndarray | None, count: int) -> tuple[float, float] | None:
    if drawn_R is None:
        return None
    low, high = interval(value, drawn_R, count)
    return max(least, low), high


def _value(sums: np.ndarray) -> np.ndarray:
    """The ratio, or ratio of two ratios, along the last axis: [..., 2] or [..., 4] becomes [...]."""
    ratio: np.ndarray = sums[..., 0] / sums[..., 1]
    return ratio if sums.shape[-1] == 2 else ratio / (sums[..., 2] / sums[..., 3])


def answers_of(folder: Path) -> dict[str, tuple[str, int, int]]:
    """The category, generated tokens and verification steps of each prompt, by its id; without prompts that need no
    step.
    """
    found = {}
    for row in read_jsonl(folder / "prompts.jsonl"):
        steps = len(row["accepted"])
        if steps:
            found[row["id"]] = (row["category"], len(tokens_with_draft(row)) - 1, steps)
    return found


def tokens_with_draft(row: Mapping[str, Any]) -> list[int]:
    """The answer with the draft, of a row of prompts.jsonl, which names it only where it differs from the plain one."""
    tokens: list[int] = row["tokens"] if row["speculative"] is None else row["speculative"]
    return tokens


def _times(folder: Path) -> dict[tuple[str, ...], tuple[float, ...]]:
    """The measured times by batch: plain seconds and tokens, then speculative ones; empty where not known."""
    file = folder / "measurements.json"  # not a part of the artifact's content
    rows: Iterable[Mapping[str, Any]] = read_json(file).get("times", ()) if file.exists() else ()
    names = ("plain_seconds", "plain_tokens", "speculative_seconds", "speculative_tokens")
    return {tuple(row["prompts"]): tuple(float(row[name]) for name in names) for row in rows}


def _rows(head: Sequence[Cell], found: Sequence[Variant], measured: Measured) -> Iterator[Sequence[Cell]]:
    for place, variant in enumerate(found):
        beside = measured.beside[place]
        yield (
            *head,
            variant.name,
            round(measured.values[place], 2),
            _text(measured.intervals[place]),
            None if beside is None else round(beside[0], 2),
            None if beside is None else _text(beside[1]),
            ", ".join(f"{value:.2f}" for value in measured.each[place]) if variant.is_repeated else None,
        )


def _text(bounds: tuple[float, float] | None) -> str | None:
    return None if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"


def _missing(name: str, why: str) -> Section:
    return Section(f"{name} by prompt", Table(("not compared",), [(why,)]))
