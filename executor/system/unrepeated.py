"""Progress lines for logs and pipes: an unchanged line is repeated only once a minute, with the time."""

from __future__ import annotations

import time

UNCHANGED_S = 60.0


class Unrepeated:
    """Filters the progress lines of one task."""

    def __init__(self) -> None:
        self._last = ""
        self._shown_at = 0.0

    def line(self, text: str) -> str:
        """The text where it differs from the last one; once a minute with the time where it does not; else empty."""
        now = time.monotonic()
        is_same = text == self._last
        if is_same and now - self._shown_at < UNCHANGED_S:
            return ""
        self._last, self._shown_at = text, now
        return f"{text} (unchanged at {time.strftime('%H:%M:%S')})" if is_same else text
