"""Reads a report as a browser would, strictly: every tag is closed where it belongs, and nothing is loaded."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "wbr"}
SVG_VOID = {"path", "rect", "circle", "polygon"}
ADDRESSES = ("href", "src", "xlink:href", "data", "action", "poster")


class Page(HTMLParser):
    """A report page, parsed. titles: of the sections by id.

    tables: rows of cells, by the id of the section. text: all visible text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.titles: dict[str, str] = {}
        self.tables: dict[str, list[list[list[str]]]] = {}
        self.frames: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.words: dict[str, list[str]] = {}
        self._section = ""
        self.feed(text)
        self.close()
        assert [] == self.open, f"never closed: {self.open}"

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        values = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.addresses += [values[name] for name in ADDRESSES if name in values]
        if tag == "iframe":
            self.frames.append(values["srcdoc"])
            assert "" == values["sandbox"]
        if tag == "section":
            self._section = values["id"]
            self.tables[self._section] = []
        if tag == "table":
            self.tables[self._section].append([])
        if tag == "tr":
            self.tables[self._section][-1].append([])
        if tag in ("td", "th"):
            self.tables[self._section][-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Refuse `<i/>`, which does not end an element in HTML.

        Only elements of pictures, and those without an end tag, may be written so.
        """
        assert tag in VOID or (tag in SVG_VOID and "svg" in self.open), f"<{tag}/> stays open in HTML"
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and tag == self.open[-1], f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert not re.search(r"url\(|@import", data)
            return
        self.words.setdefault(self._section, []).append(data)
        if self.open and self.open[-1] == "h2":
            self.titles[self._section] = data
        if "td" in self.open or "th" in self.open:
            self.tables[self._section][-1][-1][-1] += data

    def text(self, section: str | None = None) -> str:
        """The visible text of a section, or of the whole page; a line break counts as a space."""
        parts = self.words.values() if section is None else [self.words.get(section, [])]
        return " ".join(word for words in parts for text in words for word in text.split())

    def table(self, section: str, *head: str) -> list[list[str]]:
        """The rows below the head of the first table of a section that has these first columns."""
        found = [rows for rows in self.tables[section] if tuple(rows[0][: len(head)]) == head]
        assert found, [rows[0] for rows in self.tables[section]]
        return found[0][1:]
