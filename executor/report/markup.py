"""Pieces of HTML. Whatever is not `Markup` is text of unknown origin, and is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import islice

from executor.system.output import printable

NOTHING = "–"  # noqa: RUF001
MOST_ROWS = 1_000  # of a table
MOST_TEXT = 1_500_000  # characters of the parts of all nodes, without what is embedded
MOST_NAMED = 20
EMBEDDED = re.compile(r' (?:src|srcdoc)="[^"]*"')


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: object) -> Markup:
    """Any value as HTML: Markup as it is, None as a dash, a number shortened, all else escaped."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup(NOTHING)
    if isinstance(value, float):
        return Markup(escape(shown_figure(value)))
    return Markup(escape(printable(str(value))))


def breakable(name: str) -> Markup:
    """A name that may go on in the next line behind each / and _, where there is little room."""
    return Markup(re.sub("([/_])", r"\1<wbr>", html(name)))


def joined(parts: Iterable[object], between: str = "") -> Markup:
    return Markup(between.join(map(html, parts)))


def element(name: str, *content: object, **attributes: object) -> Markup:
    """`<name attribute="...">content</name>`; `class_` and `for_` lose the _, other ones become -; None is left out."""
    return Markup(f"<{name}{_attributes(attributes)}>{joined(content)}</{name}>")


def void(name: str, **attributes: object) -> Markup:
    """An element that never has content: `<img/>`, or in a picture `<circle/>`; of others HTML looks for an end."""
    return Markup(f"<{name}{_attributes(attributes)}/>")


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], class_: str | None = None) -> Markup:
    """A table that scrolls inside where it is wide; its numbers stand on the right, if its columns have names."""
    head = element("thead", element("tr", *(element("th", column, scope="col") for column in columns)))
    left = iter(rows)
    body = element("tbody", *(element("tr", *map(_cell, row)) for row in islice(left, MOST_ROWS)))
    is_named = any(columns)
    shown = element("table", head if is_named else "", body, class_=class_ if is_named else "facts")
    more = sum(1 for _ in left)
    told = paragraph(f"and {more} more rows", class_="faint") if more else ""
    return element("div", shown, told, class_="scroll", tabindex="0")


def limited(names: Sequence[str], build: Callable[[str], Markup], *, has_heads: bool = True) -> Markup:
    """A part for each name, under a head unless it has one, as long as they keep the page small; the rest is named."""
    parts: list[object] = []
    size = 0
    for place, name in enumerate(names):
        if size > MOST_TEXT:
            parts.append(paragraph(f"left out, so that the page stays small: {named(names[place:])}", class_="faint"))
            break
        content = build(name)
        size += len(EMBEDDED.sub("", content))
        parts += [element("h3", name), content] if content and has_heads else [content]
    return joined(parts)


def named(names: Sequence[str]) -> str:
    """`a, b, c and 7 more`."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def details(summary: object, *content: object, is_open: bool = False) -> Markup:
    return element("details", element("summary", summary), *content, open="" if is_open else None)


def paragraph(*content: object, class_: str | None = None) -> Markup:
    return element("p", *content, class_=class_)


def shown_figure(value: float) -> str:
    """Four digits at least, whole numbers as they are: `0.0003`, `5.825`, `31362`."""
    if math.isfinite(value) and float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"


def shown_duration(seconds: float) -> str:
    """`0.4 s`, `3 min 12 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _cell(value: object) -> Markup:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return element("td", value, class_="number" if is_number else None)


def _attributes(attributes: dict[str, object]) -> str:
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    return "".join(f' {name}="{html(value)}"' for name, value in given)
