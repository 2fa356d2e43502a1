"""The report's templates, page.html and parts.html beside this file, which show values escaped, and None as a dash."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from executor.results.run_table import shown_number
from executor.system.output import as_typed, printable
from ops.lib.pages import environment, page_style

NOTHING = "–"  # noqa: RUF001
MOST_ROWS = 1_000  # of a table
MOST_TEXT = 1_500_000  # characters of the parts of all nodes, without what is embedded
MOST_NAMED = 20
EMBEDDED = re.compile(r' (?:src|srcdoc)="[^"]*"')


def render(macro: str, *values: object) -> Markup:
    """The HTML that a macro of parts.html makes of these values."""
    content: Markup = getattr(_environment().get_template("parts.html").module, macro)(*values)
    return content


def page(**values: object) -> str:
    """The whole report page, made by page.html."""
    return _environment().get_template("page.html").render(style=page_style(), **values)


@cache
def _environment() -> Environment:
    found = environment(loader=FileSystemLoader(Path(__file__).parent), finalize=shown)
    found.globals["MOST_ROWS"] = MOST_ROWS
    return found


def shown(value: object) -> object:
    """A value as text, before it is escaped; Markup is unchanged."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return NOTHING
    return shown_number(value) if isinstance(value, float) else as_typed(printable(str(value)))


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def table(columns: Sequence[object], rows: Sequence[Sequence[object]], class_: str | None = None) -> Markup:
    """An HTML table that scrolls if it is too wide; numbers are aligned right if the columns have names."""
    return render("table", columns, rows, class_)


def mark(text: str, kind: str = "") -> Markup:
    """A text on a coloured background, as HTML. kind: good, info, warn or bad."""
    return render("mark", text, kind)


def faint(*sentences: str) -> Markup:
    """Sentences in a faint colour, each in its own paragraph, as HTML."""
    return joined(render("sentence", sentence, "faint") for sentence in sentences)


def embedded_file(kind: str, content: bytes, alt: str, width: int | None = None) -> Markup:
    """A file embedded in the page as a picture. width: in px; None: as wide as the page allows."""
    return render("picture", kind, base64.b64encode(content).decode("ascii"), alt, width)


def limited(names: Sequence[str], build: Callable[[str], Markup], *, has_heads: bool = True) -> Markup:
    """A part for each name, up to a limit of the page's size; names beyond it are only listed.

    has_heads: whether each part has a heading.
    """
    parts: list[Markup] = []
    size = 0
    for place, name in enumerate(names):
        if size > MOST_TEXT:
            parts.append(faint(left_out(names[place:])))
            break
        content = build(name)
        size += len(EMBEDDED.sub("", content))
        parts.append(render("headed", name, content) if content and has_heads else content)
    return joined(parts)


def left_out(names: Sequence[str]) -> str:
    """A sentence that lists the first of the names that were left out."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"left out to keep the page small: {', '.join(names[:MOST_NAMED])}{more}"


def breakable(name: str) -> Markup:
    """A name that may be broken after each / and _."""
    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(printable(name)))))
