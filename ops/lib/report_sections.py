"""Sections that an op shows of its artifact in `dflow report`, and those that several ops share.

They come from hooks of the op (dsl/op_class.py), which load no torch:

    report(folder of the artifact) -> Sequence[Section]
    compare(artifacts, each a Compared) -> Sequence[Section]

All text is plain: the report escapes it. The one exception is `Html`, which is shown in a sandboxed frame in which no
script runs and nothing is loaded.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from attrs import field, frozen

from dsl.errors import ConfigError, shortened
from dsl.finding import Finding, Level
from dsl.op_class import Question
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.sample_account import NOT_TAKEN, losses_of

Cell = str | int | float | None
MOST = int(sys.float_info.max)
DROPPED_SHOWN = 20
ROWS_READ = 50_000  # of samples.jsonl: a report must not take minutes
BINS = 16
DIGEST = re.compile(r"[0-9a-f]{64}")


@frozen
class Table:
    """Rows of cells under the names of the columns; numbers are right-aligned, None is a dash. Two columns
    without names, "", are names and values, which a report of several runs joins into one table.

    Raises ConfigError for a row of another length.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __attrs_post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ConfigError(f"a table of {len(self.columns)} columns has the row {shortened(str(list(wrong[0])))}")


@frozen
class Series:
    """Points of one colour. x are numbers, or names for bars; low and high: the interval of each y, None without one.

    A y that is not finite leaves a gap. Raises ConfigError for lists of different lengths, for a y or a bound
    that is not a number, and for an x that is not finite.
    """

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    def __attrs_post_init__(self) -> None:
        lengths = {len(values) for values in (self.x, self.y, self.low or self.y, self.high or self.y)}
        if len(lengths) > 1 or bool(self.low) != bool(self.high):
            raise ConfigError(f'series "{self.name}": x, y, low and high differ in length')
        bounds = [bound for bound in (*self.low, *self.high) if bound is not None]
        wrong = [value for value in (*self.y, *bounds) if not _is_number(value)]
        if wrong:
            raise ConfigError(f'series "{self.name}": {_shown_number(wrong[0])} is not a number')
        nowhere = [x for x in self.x if not isinstance(x, str) and not (_is_number(x) and math.isfinite(x))]
        if nowhere:
            raise ConfigError(f'series "{self.name}": {_shown_number(nowhere[0])} is not finite')


@frozen
class Chart:
    """Lines over numbers, or bars with whiskers. log_y: a logarithmic y axis where all values are above 0 and the
    largest is a hundred times the smallest. Raises ConfigError for x that are not all numbers nor, of bars, all names.
    """

    series: Sequence[Series]
    x_label: str
    y_label: str
    kind: Literal["lines", "bars"] = "lines"
    log_y: bool = False

    def __attrs_post_init__(self) -> None:
        every = [x for series in self.series for x in series.x]
        is_named = self.kind == "bars" and all(isinstance(x, str) for x in every)
        if not is_named and not all(isinstance(x, (int, float)) for x in every):
            raise ConfigError(f'chart of "{self.y_label}": its x are not all numbers')


@frozen
class Html:
    """A page or a part of one, from a file of the artifact, already escaped. height: px of its frame."""

    text: str
    height: int = 480


@frozen
class Picture:
    """A PNG, JPEG, GIF or WebP file; alt: a description for readers who cannot see it."""

    path: Path
    alt: str


@frozen(kw_only=True)
class Account:
    """Counts of the samples that a node read: came_in = all kept + all dropped.

    kept: by split; dropped: by reason. splits: those that the node reads; empty: all. The report joins the
    accounts of all nodes, from the source to the training, and shows where they do not add up.
    """

    came_in: int
    kept: Mapping[str, int]
    dropped: Mapping[str, int] = field(factory=dict)
    splits: Sequence[str] = ()


Body = Table | Chart | Html | Picture | Account | Finding


@frozen
class Section:
    """A part of a report: a title, what is shown, and a note below in plain text; is_timed: as of `verdict`.

    In a report of several runs, sections of the same title and node are side by side, and their charts are one.
    """

    title: str
    body: Body
    note: str = ""
    is_timed: bool = False


def verdict(question: Question, text: str, level: Level = "info", advice: str = "") -> Finding:
    """A sentence on the first screen of the report, under its question: "target", is the trained target better;
    "good", is the draft good; "safe", is it safe to serve; "limit", what limits it. The section's title is what was
    judged.

    level: how it is marked. advice: listed under "what to do next". Where the figure is a measured time, the section is
    timed: the report adds which nodes of the run ran meanwhile. Raises ConfigError for another question or level.
    """
    if question not in get_args(Question) or level not in get_args(Level):
        questions, levels = ", ".join(get_args(Question)), ", ".join(get_args(Level))
        raise ConfigError(f"verdict({question!r}, ..., {level!r}): questions are {questions}, and levels {levels}")
    return Finding(text, advice=advice, level=level, code=question)


@frozen
class Compared:
    """An artifact that is compared with others of its op. values: by group of a sweep ("train.lr") what it has, and
    under "run" its run where there are several.
    """

    folder: Path
    values: Mapping[str, str]


@frozen
class Variant:
    """Artifacts that differ in the seed only, under the name of what they have in common."""

    name: str
    folders: Sequence[Path]
    seeds: Sequence[str]

    @property
    def is_repeated(self) -> bool:
        return len(self.folders) > 1


def variants(artifacts: Iterable[Compared]) -> list[Variant]:
    """In the order given; the first is the one that the others are compared with. A seed is a group whose field is
    named so.
    """
    found: dict[str, list[tuple[Path, str]]] = {}
    for artifact in artifacts:
        seeds, others = [], {}
        for group, value in artifact.values.items():
            label = group.rpartition(".")[2]
            if label == "seed":
                seeds.append(value)
            else:
                others[label] = value
        name = next(iter(others.values())) if len(others) == 1 else ", ".join(f"{a}={b}" for a, b in others.items())
        found.setdefault(name or "all", []).append((artifact.folder, ", ".join(seeds)))
    return [
        Variant(name, [folder for folder, _ in of_variant], [seed for _, seed in of_variant])
        for name, of_variant in found.items()
    ]


def account_sections(folder: Path) -> list[Section]:
    """The samples that a data op kept and dropped, what limits the draft where these are many, and the first that it
    dropped for a fault.
    """
    summary = read_json(folder / "summary.json")
    account = Account(came_in=summary["in"], kept=summary["splits"], dropped=summary["dropped"])
    sections = [Section("samples", account)]
    with (folder / "dropped.csv").open(encoding="utf-8", newline="") as file:
        header, *at_fault = (row for row in csv.reader(file) if len(row) > 1 and row[1] != NOT_TAKEN)
    rows = at_fault[:DROPPED_SHOWN]
    if rows:
        total = len(at_fault)
        note = f"the first {len(rows)} of {total}; all are in dropped.csv" if total > len(rows) else ""
        sections.append(Section("dropped samples", Table(header, rows), note))
    sections += [
        Section(f"lost {loss.of}", verdict("limit", loss.text, "warning", loss.remedy)) for loss in losses_of(summary)
    ]
    return sections


def facts(values: Mapping[str, Any], names: Sequence[str] = ()) -> Table:
    """A row for each value, or for each present one of `names`."""
    chosen = {name: values[name] for name in names if name in values} if names else values
    return Table(("", ""), [(name, shown_value(value)) for name, value in chosen.items()])


def shown_value(value: Any) -> Cell:
    """A value of a JSON file as a cell: numbers and texts unchanged, digests shortened."""
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value[:12]
    if value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)


def shard_counts(shards: Iterable[Mapping[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Samples and tokens by split, of the entries of tokens.json or features.json."""
    samples: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for shard in shards:
        samples[shard["split"]] += shard["samples"]
        tokens[shard["split"]] += shard["tokens"]
    return samples, tokens


SPEEDUP = "speedup"  # how metrics of it end
NOT_KNOWN = "not known"
WIDEST = 4.0


def is_known(low: float | None, high: float | None) -> bool:
    """Whether the interval of a speed-up says anything: not where it reaches from slower to faster and from 0, or over
    more than WIDEST times its lower end.
    """
    return low is None or high is None or not low <= 1 <= high or 0 < high <= WIDEST * low


def interval_text(measured: Mapping[str, Any], otherwise: str) -> str:
    """The interval of a figure with "low" and "high", as in report.json: "3.10 to 3.52"; `otherwise` if it has none."""
    return otherwise if measured["low"] is None else f"{measured['low']:.2f} to {measured['high']:.2f}"


def first_rows(file: Path) -> list[dict[str, Any]]:
    """The first ROWS_READ rows."""
    return list(islice(read_jsonl(file), ROWS_READ))


def histogram(name: str, values: Sequence[float]) -> Series:
    """Counts of the values in up to BINS bins of equal width; x: the lower bound of a bin."""
    low, high = min(values), max(values)
    width = max(1, -(-(int(high) - int(low) + 1) // BINS))
    counts = Counter((int(value) - int(low)) // width for value in values)
    bins = range(max(counts) + 1)
    return Series(name, [int(low) + place * width for place in bins], [counts[place] for place in bins])


def _is_number(value: object) -> bool:
    """Whether a float can hold it."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MOST)


def _shown_number(value: object) -> str:
    return "an int too large for a float" if isinstance(value, int) else shortened(str(value))
