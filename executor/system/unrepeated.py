"""Lines that tell how far something is, for logs and pipes: the same one again only now and then, with the time."""

from __future__ import annotations

import time

UNCHANGED_S = 60.0


class Unrepeated:
    """Of one work: which of its lines are worth saying."""

    def __init__(self) -> None:
        self._last = ""
        self._said_at = 0.0

    def line(self, text: str) -> str:
        """The text where it is another one than before; each minute with the time where nothing changes; else empty."""
        now = time.monotonic()
        is_same = text == self._last
        if is_same and now - self._said_at < UNCHANGED_S:
            return ""
        self._last, self._said_at = text, now
        return f"{text} (unchanged at {time.strftime('%H:%M:%S')})" if is_same else text
