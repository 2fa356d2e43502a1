"""The log of a stage with secrets: its output goes through a pipe, where dsl/secrets.py replaces each value."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from dsl.files import appended
from dsl.secrets import BETWEEN, redact, written_forms

CHUNK = 65536
LINE_END = b"\n"
LONGEST = 1 << 20  # bytes of a line that are buffered until its end
CLOSE_S = 10.0
LOOKED_AT = 4  # times the length of the longest form: with what is between its characters
GAPS = re.compile(BETWEEN.pattern.encode() + rb"|\x1b(?:\[[0-?]*[ -/]*)?\Z")  # the last: one that is not complete yet


class RedactedLog:
    """A thread that copies a FIFO to a log line by line, with secrets replaced; `pipe` receives the stage's output.

    error: why the log could not be written. After such an error nobody reads the FIFO, so the stage's next output
    fails.
    """

    def __init__(self, pipe: Path, log: Path, secrets: Sequence[str]) -> None:
        self.pipe = pipe
        self.error: OSError | None = None
        self._log = log
        self._secrets = tuple(secrets)
        forms = [form.encode(errors="surrogateescape") for form in written_forms(self._secrets)]
        self._forms = [GAPS.sub(b"", form) for form in forms]
        os.mkfifo(pipe, 0o600)
        self._reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a writer
        self._writing = os.open(pipe, os.O_WRONLY)  # without a writer, copying would end before the stage starts
        os.set_blocking(self._reading, True)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the stage's whole output is in the log, but not for processes that it left behind."""
        os.close(self._writing)
        self._thread.join(CLOSE_S)
        self.pipe.unlink(missing_ok=True)

    def _copy(self) -> None:
        waiting = bytearray()
        try:
            with appended(self._log) as log:
                while data := os.read(self._reading, CHUNK):
                    waiting += data
                    end = len(waiting) if len(waiting) > LONGEST else waiting.rfind(LINE_END) + 1
                    end -= self._partial_secret(waiting, end)
                    if end > 0:
                        log.write(self._redacted(waiting[:end]))
                        log.flush()
                        del waiting[:end]
                log.write(self._redacted(waiting))
        except OSError as error:
            self.error = error
        os.close(self._reading)

    def _partial_secret(self, text: bytearray, end: int) -> int:
        """The number of bytes before `end` that may be the start of a secret that continues after it."""
        longest = max(map(len, self._forms), default=1) - 1
        start = max(0, end - LOOKED_AT * longest)
        last = bytes(text[start:end])
        gaps = {place for found in GAPS.finditer(last) for place in range(*found.span())}
        places = [place for place in range(len(last)) if place not in gaps]
        shown = bytes(last[place] for place in places)
        for count in range(min(longest, len(shown)), 0, -1):
            if any(form.startswith(shown[-count:]) for form in self._forms):
                return len(last) - places[-count]
        return 0

    def _redacted(self, text: bytearray) -> bytes:
        """The text with secrets replaced, even those that span several lines."""
        return redact(text.decode(errors="surrogateescape"), self._secrets).encode(errors="surrogateescape")
