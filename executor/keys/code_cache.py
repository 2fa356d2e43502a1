"""A cache of code fingerprints, valid while no file that they were read from, or might be read from, has changed.

Tracing the code of all built-in ops takes about a second, checking the stamps of their files a few milliseconds.

<memos>/code.jsonl    for each run function with its classes: the hashes of all code it reaches; the SHA-256 of the
                      files that were read, their stamps and those of the fingerprinting code itself; and the state of
                      the paths where a module was searched
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import attrs

import dsl
from dsl.encoding import encode
from dsl.fingerprint import kind_of, read_code
from executor.system.jsonl_cache import Memo
from executor.system.stamps import Stamp, is_settled

FINGERPRINTING = tuple(
    Path(dsl.__file__).with_name(f"{name}.py")
    for name in ("fingerprint", "imports", "source", "import_side_effects", "syntax", "encoding", "op_class")
)
SPARE_LINES = 20  # of some 10 kB each


class CodeHashes(dict[str, str]):
    """Hashes by "module:symbol"; not to be changed, since nodes of one op share it and its encoding."""

    @cached_property
    def encoded(self) -> bytes:
        """As it enters a key."""
        return encode(dict(self))


class CodeMemo:
    """The code at one moment: within the life of an object every file is looked at once."""

    def __init__(self, memo: Path | None, now: Callable[[], float] = time.time) -> None:
        self._memo = Memo(memo, "code", SPARE_LINES)
        self._asked_at = now()
        self._stamp = cache(_stamp)
        self._kind = cache(lambda path: kind_of(Path(path)))
        self.contents: dict[str, str] = {}  # the SHA-256 of each file that was read
        self._hashes: dict[tuple[tuple[str, ...], tuple[Path, ...], tuple[str, ...]], CodeHashes] = {}

    @cached_property
    def _lines(self) -> dict[str, dict[str, Any]]:
        return self._memo.newest()

    def of(self, functions: Sequence[str], roots: Sequence[Path], classes: Sequence[str] = ()) -> CodeHashes:
        """The hashes of `read_code`. Raises ConfigError as it does."""
        request = (tuple(functions), tuple(roots), tuple(classes))
        if request not in self._hashes:
            self._hashes[request] = CodeHashes(self._remembered(functions, roots, classes))
        return self._hashes[request]

    def _remembered(self, functions: Sequence[str], roots: Sequence[Path], classes: Sequence[str]) -> dict[str, str]:
        label = json.dumps([*functions, [str(root) for root in roots], *classes, sys.implementation.cache_tag])
        line = self._lines.get(label)
        if line is not None and self._holds(line):
            self.contents.update(line["contents"])
            return dict(line["hashes"])
        code = read_code(functions, roots, classes)
        contents = {str(path): sha256 for path, sha256 in code.read.items()}
        self.contents.update(contents)
        stamps = {str(path): self._stamp(str(path)) for path in (*FINGERPRINTING, *sorted(code.read))}
        settled = {
            path: attrs.astuple(stamp) for path, stamp in stamps.items() if stamp and is_settled(stamp, self._asked_at)
        }
        if len(settled) == len(stamps):
            looked_for = {str(path): kind for path, kind in code.looked_for.items() if path not in code.read}
            line = {"code": label, "files": settled, "contents": contents, "looked_for": looked_for}
            self._memo.add({**line, "hashes": code.hashes})
        return code.hashes

    def _holds(self, line: Mapping[str, Any]) -> bool:
        if "contents" not in line or not {str(path) for path in FINGERPRINTING} <= line["files"].keys():
            return False  # of another dflow
        for path, stamp in line["files"].items():
            now = self._stamp(path)
            if now is None or attrs.astuple(now) != tuple(stamp):
                return False
        return all(self._kind(path) == kind for path, kind in line["looked_for"].items())


def _stamp(path: str) -> Stamp | None:
    try:
        return Stamp.of(Path(path))
    except OSError:
        return None
