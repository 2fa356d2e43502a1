"""Report sections of `inject_images`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ops.lib.report_sections import Section, account_sections


def report(folder: Path) -> Sequence[Section]:
    """The report sections of injected images: the account of samples."""
    return account_sections(folder)
