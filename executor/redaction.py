"""The log of a stage that was given secrets: what it prints comes through a pipe, and no value reaches the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from dsl.secrets import redact

CHUNK = 65536
LINE_END = b"\n"
CLOSE_S = 10.0


class RedactedLog:
    """Copies a FIFO to a log line by line, the values of secrets replaced; `pipe` is where the stage's output goes."""

    def __init__(self, pipe: Path, log: Path, secrets: Sequence[str]) -> None:
        self.pipe = pipe
        self._log = log
        self._secrets = tuple(secrets)
        os.mkfifo(pipe, 0o600)
        self._reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # returns though nobody writes yet
        self._writing = os.open(pipe, os.O_WRONLY)  # without a writer, the copying would end before the stage begins
        os.set_blocking(self._reading, True)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when all that the stage printed is in the log; processes that it left behind are not waited for."""
        os.close(self._writing)
        self._thread.join(CLOSE_S)
        self.pipe.unlink(missing_ok=True)

    def _copy(self) -> None:
        rest = b""
        with self._log.open("ab", buffering=0) as log:
            while data := os.read(self._reading, CHUNK):
                whole, end, rest = (rest + data).rpartition(LINE_END)
                log.write(self._redacted(whole + end))
            log.write(self._redacted(rest))
        os.close(self._reading)

    def _redacted(self, text: bytes) -> bytes:
        """A secret of several lines is replaced where its lines were printed at once."""
        return redact(text.decode(errors="surrogateescape"), self._secrets).encode(errors="surrogateescape")
