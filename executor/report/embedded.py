"""Pictures and pages of artifacts inside the report, up to a limit; what is larger is told by its path."""

from __future__ import annotations

import base64
from pathlib import Path

from attrs import define

from executor.maintenance.disk_use import shown_size
from executor.report.markup import Markup, element, paragraph, void

PICTURE_MOST = 1_000_000  # bytes of a file
PAGE_MOST = 2_000_000
TOTAL_MOST = 16_000_000  # of all together: what a phone still opens
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp"}


@define
class Embedded:
    """Counts what the report holds already."""

    used: int = 0

    def picture(self, path: Path, alt: str) -> Markup:
        kind = KINDS.get(path.suffix.lower())
        if kind is None:
            return _note(f"{alt}: {path} is no picture of a kind that is shown ({', '.join(KINDS)})")
        try:
            size = path.stat().st_size
            if not self._takes(size, PICTURE_MOST):
                return _note(f"{alt}: {shown_size(size)}, too large to be shown here: {path}")
            content = path.read_bytes()
        except OSError as error:
            return _note(f"{alt}: {path} cannot be read ({error.strerror})")
        data = base64.b64encode(content).decode("ascii")
        return void("img", src=f"data:{kind};base64,{data}", alt=alt)

    def page(self, text: str, height: int, title: str, folder: Path) -> Markup:
        """In a frame of its own, where no script runs; that nothing is loaded holds there too."""
        if not self._takes(len(text.encode(errors="replace")), PAGE_MOST):
            return _note(f"{title}: {shown_size(len(text))}, too large to be shown here; it lies in {folder}")
        return element("iframe", srcdoc=text, sandbox="", title=title, style=f"height: {height}px")

    def _takes(self, size: int, most: int) -> bool:
        if size > most or self.used + size > TOTAL_MOST:
            return False
        self.used += size
        return True


def _note(text: str) -> Markup:
    return paragraph(text, class_="faint")
