"""The tests that tell most in a minute, `make quick`, and those of some files, `make quick FILE="PATH ..."`.

Without a file: every test of the kind `unit`, see kinds.py. With files: the test file that is named after each, of any
kind; and of all test files that import one of them, on whatever way, the UNITS nearest of the kind `unit`, or the
OTHERS nearest of any kind where there is none. Tests that have not begun in BEGINS_WITHIN_S are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from import_graph import ROOT, files_of, imported
from kinds import kind_of
from time_limit import SECONDS

TESTS = ROOT / "tests"
UNITS, OTHERS = 6, 2  # test files of one run, so that it stays quick
BEGINS_WITHIN_S = 5.0


def main(given: Sequence[str]) -> int:
    files = [(ROOT / name).resolve() for name in given]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        print(f"no such file: {', '.join(missing)}; give paths from the project's root", file=sys.stderr)
        return 2
    tests = affected(files) if files else [path for path in all_tests() if kind_of(path) == "unit"]
    chosen = [str(path.relative_to(ROOT)) for path in tests]  # others are not even imported
    if files and not chosen:
        print("no test imports it; `make test` runs all", file=sys.stderr)
        return 2
    options = ["-m", "not slow", "--numprocesses", "2", "--dist", "loadfile"]
    environment = {**os.environ, SECONDS: str(BEGINS_WITHIN_S)} if files else None
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def all_tests() -> list[Path]:
    return [path for path in sorted(TESTS.rglob("test_*.py")) if "sglang" not in path.parts]


def affected(files: Sequence[Path]) -> list[Path]:
    """The test files to run for these files: their own, then the nearest first."""
    tests = all_tests()
    mirrored = {TESTS / path.relative_to(ROOT).with_name(f"test_{path.name}") for path in files}
    own = [path for path in tests if path in mirrored]
    far = {path: steps for path in tests if path not in own and (steps := distance(path, files)) is not None}
    units = [path for path in far if kind_of(path) == "unit"]
    nearest = min(far.values(), default=0)
    others = [] if own else [path for path in far if far[path] == nearest]
    folders = {path.parent for path in mirrored}
    found = sorted(units or others, key=lambda path: (far[path], path.parent not in folders))
    return own + found[: UNITS if units else OTHERS]


def distance(start: Path, files: Sequence[Path]) -> int | None:
    """The number of imports from a file to the nearest of these files, 0 for itself; None if none leads there."""
    seen, layer, steps = {start}, [start], 0
    while layer:
        if any(path in files for path in layer):
            return steps
        following = [path for here in layer for name in imported(here) for path in files_of(name)]
        layer = [path for path in dict.fromkeys(following) if path not in seen]
        seen.update(layer)
        steps += 1
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
