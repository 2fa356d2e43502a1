"""The nodes of benchmarks/execution.py as tasks of doit, listed in chain.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import work
from doit.tools import config_changed

HERE = Path(__file__).resolve().parent
DOIT_CONFIG = {"verbosity": 0}


def task_chain() -> Iterator[dict[str, Any]]:
    """A call of a function in doit's own process, which is what its manual shows first."""
    chain = json.loads((HERE / "chain.json").read_text())
    for index, value in enumerate(chain["values"]):
        before = HERE / f"n{index - 1}.txt" if index else None
        out = HERE / f"n{index}.txt"
        yield {
            "name": f"n{index}",
            "actions": [(work.append, [f"n{index}", out, value, before, chain["seconds"]])],
            "file_dep": [str(before)] if before is not None else [],
            "targets": [str(out)],
            "uptodate": [config_changed(value)],
        }


def task_large() -> Iterator[dict[str, Any]]:
    """A process of its own."""
    for megabytes in json.loads((HERE / "chain.json").read_text())["large"]:
        yield {
            "name": "file",
            "actions": [[sys.executable, "work.py", "large", "large.txt", "input.txt", str(megabytes)]],
            "file_dep": ["input.txt"],
            "targets": ["large.txt"],
        }
