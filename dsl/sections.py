"""What an op shows of an artifact of its own in `dflow report`, and how all reports look.

An op names one function, without torch:

    @op(..., report="module:function")   (folder of the artifact) -> Sequence[Section]

All text is plain: the report escapes it. The one exception is `Html`, which is shown in a frame of its own in which no
script runs and nothing is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from dsl.op import OpSpec

Cell = str | int | float | None

# The colours of all pages that dflow writes, readable in the light and in the dark.
STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f6f7f9; --text: #1b1f24; --faint: #5a6370; --line: #d5dae1; --link: #0a58ca;
  --good: #cdebd6; --warn: #fbe6b0; --bad: #f8cdc8; --info: #d3e2fa; --none: #e6e8ec;
  --series-0: #1f6fd6; --series-1: #d1581a; --series-2: #1a8a4c; --series-3: #8b46c7; --series-4: #b8860b;
  --series-5: #c2316f; --series-6: #0d8a99; --series-7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --panel: #1d2127; --text: #e4e7eb; --faint: #9aa4b1; --line: #38404a; --link: #7db2ff;
    --good: #1f4d33; --warn: #5a4716; --bad: #63272a; --info: #233f6b; --none: #2f353d;
    --series-0: #6aa9ff; --series-1: #ff9355; --series-2: #58c98a; --series-3: #c08cf2; --series-4: #e0b341;
    --series-5: #f277a8; --series-6: #4ec5d4; --series-7: #a3acb8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
a { color: var(--link); }
"""


@frozen
class Table:
    """Rows of cells under the names of the columns; a number stands on the right, None as a dash."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@frozen
class Series:
    """Points of one colour. x are numbers, or for bars names too; low and high: the interval of each y, None for none.

    A y that is not finite leaves a gap.
    """

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@frozen
class Chart:
    """Lines over numbers, or bars with whiskers. log_y: the y axis is logarithmic where all values are above 0."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    kind: Literal["lines", "bars"] = "lines"
    log_y: bool = False


@frozen
class Html:
    """A page or a part of one, from a file of the artifact, escaped by whoever made it. height: px of its frame."""

    text: str
    height: int = 480


@frozen
class Picture:
    """A PNG, JPEG, GIF or WebP file; alt says what it shows to who cannot see it."""

    path: Path
    alt: str


@frozen(kw_only=True)
class Account:
    """What became of the samples that a node read: came_in = all kept + all dropped.

    kept: by split; dropped: by reason. The report puts those of all nodes together, from the source to the training.
    """

    came_in: int
    kept: Mapping[str, int]
    dropped: Mapping[str, int] = field(factory=dict)


Body = Table | Chart | Html | Picture | Account


@frozen
class Section:
    """A part of a report: a title, what is shown, and a note below in plain text.

    Sections of the same title and node stand side by side where a report shows several runs; charts are drawn into one.
    """

    title: str
    body: Body
    note: str = ""


def load_report(spec: OpSpec) -> Callable[[Path], Sequence[Section]] | None:
    """The function that shows an artifact of the op, None where it names none."""
    if spec.report is None:
        return None
    module, _, name = spec.report.partition(":")
    function: Any = getattr(importlib.import_module(module), name)
    return function  # type: ignore[no-any-return]
