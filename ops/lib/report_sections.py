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
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from attrs import Factory, frozen

from dsl.errors import ConfigError, shortened
from dsl.finding import Field, Finding, Level
from dsl.op_class import Question
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.sample_account import NOT_TAKEN, losses_of

Cell = str | int | float | None
DROPPED_SHOWN = 20
ROWS_READ = 50_000  # of samples.jsonl: a report must not take minutes
DIGEST = re.compile(r"[0-9a-f]{64}")


@frozen
class Table:
    """A table of a report: rows of cells under column names; numbers are aligned right, None is a dash.

    Two columns without names, "", are names and values. Raises ConfigError for a row of another length.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __attrs_post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ConfigError(f"a table of {len(self.columns)} columns has the row {shortened(str(list(wrong[0])))}")


@frozen
class Html:
    """A page or a part of one, from an HTML file of the artifact, already escaped. height: of its frame, in px."""

    text: str
    height: int = 480


@frozen
class Picture:
    """A picture of a report: a PNG, JPEG, GIF or WebP file. alt: a description for readers who cannot see it."""

    path: Path
    alt: str


@frozen(kw_only=True)
class Account:
    """The counts of samples in a node: came_in = all kept + all dropped.

    kept: by split. dropped: by reason. splits: those that the node reads; empty for all. conversations: those that were
    kept, where one may become several samples. The report joins the accounts of all nodes from the source to the
    training, and shows where they do not add up.
    """

    came_in: int
    kept: Mapping[str, int]
    dropped: Mapping[str, int] = Factory(dict)
    splits: Sequence[str] = ()
    conversations: int | None = None


Body = Table | Html | Picture | Account | Finding


@frozen
class Section:
    """A section of a report: a title, a body, and a note below it in plain text. is_timed: see `verdict`.

    Curves and bars are pictures that the op draws while it runs (`stage.figure`), for MLflow and the report alike.
    """

    title: str
    body: Body
    note: str = ""
    is_timed: bool = False


def verdict(question: Question, text: str, level: Level = "info", advice: str = "", field: str = "") -> Finding:
    """A sentence for the report's first screen, in answer to a question. The section's title says what was judged.

    question: "target": is the trained target better; "good": is the draft good; "safe": is it safe to serve; "limit":
    what limits it. level: how the sentence is marked. advice: listed under "what to do next". field: the node's field
    that the advice concerns. If the figure is a measured time, mark the section as timed: the report then adds the
    nodes that ran at the same time. Raises ConfigError for another question or level.
    """
    if question not in get_args(Question) or level not in get_args(Level):
        questions, levels = ", ".join(get_args(Question)), ", ".join(get_args(Level))
        raise ConfigError(f"verdict({question!r}, ..., {level!r}): questions are {questions}, and levels {levels}")
    return Finding(text, Field(field) if field else None, advice, level, question)


@frozen
class Compared:
    """An artifact to be compared with others of its op. values: its value in each group of a sweep ("train.lr").

    With several runs, "run" is a group too.
    """

    folder: Path
    values: Mapping[str, str]


@frozen
class Variant:
    """Artifacts that differ only in their seed. name: what they have in common."""

    name: str
    folders: Sequence[Path]
    seeds: Sequence[str]

    @property
    def is_repeated(self) -> bool:
        return len(self.folders) > 1


def variants(artifacts: Iterable[Compared]) -> list[Variant]:
    """Group artifacts that differ only in their seed, in the order given.

    The first group is the one that others are compared with. A seed is a value whose group's field is named "seed".
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
    """The report sections on the samples of a data op: kept and dropped ones, and the first ones dropped for a fault.

    A verdict warns if the losses are large.
    """
    summary = read_json(folder / "summary.json")
    kept = summary["kept"]
    account = Account(
        came_in=summary["in"],
        kept=summary["splits"],
        dropped=summary["dropped"],
        conversations=None if kept == sum(summary["splits"].values()) else kept,
    )
    sections = [Section("samples", account)]
    with (folder / "dropped.csv").open(encoding="utf-8", newline="") as file:
        header, *at_fault = (row for row in csv.reader(file) if len(row) > 1 and row[1] != NOT_TAKEN)
    rows = at_fault[:DROPPED_SHOWN]
    if rows:
        total = len(at_fault)
        note = f"the first {len(rows)} of {total}; all are in dropped.csv" if total > len(rows) else ""
        sections.append(Section("dropped samples", Table(header, rows), note))
    sections += [
        Section(f"lost {loss.of}", verdict("limit", loss.text, "warning", loss.remedy_on_a_line))
        for loss in losses_of(summary)
    ]
    return sections


def facts(values: Mapping[str, Any], names: Sequence[str] = ()) -> Table:
    """A table with a row for each value. names: show only these, as far as present."""
    chosen = {name: values[name] for name in names if name in values} if names else values
    return Table(("", ""), [(name, shown_value(value)) for name, value in chosen.items()])


def shown_value(value: Any) -> Cell:
    """A value of a JSON file as a table cell: numbers and texts unchanged, digests shortened."""
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value[:12]
    if value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)


def shard_counts(shards: Iterable[Mapping[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """The number of samples and of tokens by split, from the entries of tokens.json or features.json."""
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
    """Whether the interval of a speed-up is narrow enough to mean something.

    An interval around 1 must start above 0, and its end must be at most WIDEST times its start.
    """
    return low is None or high is None or not low <= 1 <= high or 0 < high <= WIDEST * low


def interval_text(measured: Mapping[str, Any], otherwise: str) -> str:
    """The interval of a figure with "low" and "high", as in report.json: "3.10 to 3.52"; `otherwise` if it has none."""
    return otherwise if measured["low"] is None else f"{measured['low']:.2f} to {measured['high']:.2f}"


def first_rows(file: Path) -> list[dict[str, Any]]:
    """The first ROWS_READ rows of a JSONL file."""
    return list(islice(read_jsonl(file), ROWS_READ))


def spread(values: Sequence[float]) -> Table:
    """A table with the smallest value, the median, the 95th percentile, and the largest."""
    found = sorted(values)
    places = {"smallest": 0, "median": (len(found) - 1) // 2, "95 % up to": -(-95 * len(found) // 100) - 1}
    return Table(("", ""), [*((name, found[place]) for name, place in places.items()), ("largest", found[-1])])
