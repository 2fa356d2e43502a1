"""The code of nodes at one moment, with a memo of what was read from each file while it stays as it is.

Parsing the modules of all built-in ops takes a second, looking at their stamps a few milliseconds.

<memos>/modules.jsonl    what `read_source` gives for each file, by its stamp and a digest of the code that read it
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

import dsl.closure
import dsl.encoding
import dsl.op_class
from dsl.closure import ModuleSource, Project, read_source
from dsl.encoding import encode
from dsl.errors import ConfigError
from executor.system.stamps import Memo, Stamp, is_settled

READERS = tuple(Path(module.__file__ or "") for module in (dsl.closure, dsl.encoding, dsl.op_class))


class CodeDigests(dict[str, str]):
    """The digests of source files by path. Never changed, since nodes of one op share it and its encoding."""

    @cached_property
    def encoded(self) -> bytes:
        """The encoded digests, as they enter a key."""
        return encode(dict(self))


class CodeMemo:
    """A cache of code digests. An object reads every file once; without a memo file, every file is parsed."""

    def __init__(self, memo: Path | None, now: Callable[[], float] = time.time) -> None:
        self._memo = Memo(memo, "path")
        self._asked_at = now()
        self.contents: dict[str, str] = {}  # the SHA-256 of each file that was read
        self._projects: dict[tuple[Path, ...], Project] = {}
        self._digests: dict[tuple[tuple[str, ...], tuple[Path, ...], tuple[str, ...]], CodeDigests] = {}

    @cached_property
    def _lines(self) -> dict[str, dict[str, Any]]:
        return self._memo.newest()

    @cached_property
    def _reader(self) -> str:
        code = b"".join(file.read_bytes() for file in READERS)
        return f"{sys.implementation.cache_tag} {hashlib.sha256(code).hexdigest()}"

    def of(self, functions: Sequence[str], roots: Sequence[Path], classes: Sequence[str] = ()) -> CodeDigests:
        """The code digests of `Project.closure` for these arguments. Raises ConfigError as it does."""
        request = (tuple(functions), tuple(roots), tuple(classes))
        if request not in self._digests:
            project = self._projects.setdefault(request[1], Project(request[1], self._read))
            closure = project.closure(functions, classes)
            self.contents |= {str(path): sha256 for path, sha256 in closure.read.items()}
            self._digests[request] = CodeDigests(closure.digests)
        return self._digests[request]

    def _read(self, path: Path) -> ModuleSource:
        try:
            stamp = Stamp.of(path)
            state = [*attrs.astuple(stamp), self._reader]
            line = self._lines.get(str(path))
            if line is not None and line.get("state") == state:
                return ModuleSource(**line["source"])
            source = read_source(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); it is code of the pipeline") from error
        if is_settled(stamp, self._asked_at):
            self._memo.add({"path": str(path), "state": state, "source": attrs.asdict(source)})
        return source
