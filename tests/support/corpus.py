"""The corpus of mistakes: tests/dsl/mistakes has a folder for each, with the pipeline and what is to be told of it.

A folder holds pipeline.toml or pipeline.py, files that it names, arguments.json where there are some, and expected.txt
with all lines as `dflow plan` prints them, FOLDER standing for the folder's path.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dsl.read_toml import read_graph
from executor.commands.arguments import add_overrides, add_selection, add_sweeps
from executor.planning.selection import selected

CORPUS = Path(__file__).parents[1] / "dsl" / "mistakes"
CASES = sorted(path for path in CORPUS.iterdir() if path.is_dir() and path.name != "__pycache__")


def read_case(case: Path) -> None:
    """Read the pipeline of a case, from within its folder. Raises PipelineError."""
    parser = argparse.ArgumentParser()
    add_overrides(parser)
    add_sweeps(parser)
    add_selection(parser)
    arguments = case / "arguments.json"
    options = parser.parse_args(json.loads(arguments.read_text()) if arguments.exists() else [])
    file = "pipeline.py" if (case / "pipeline.py").exists() else "pipeline.toml"
    selected(read_graph(Path(file), options.set, options.sweep), options.to, options.only)


def as_written(case: Path, told: str) -> str:
    """What is told, without this machine's folders."""
    return told.replace(str(case), "FOLDER").replace(str(CORPUS), "CORPUS")
