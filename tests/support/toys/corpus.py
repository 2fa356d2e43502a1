"""The corpus of mistakes: tests/dsl/mistakes has a page for each topic, with pipelines and what is reported of them.

A case is a heading and code blocks: pipeline.toml or pipeline.py, other files that name themselves behind the block's
language, the arguments of the command line as JSON, and all lines as `dflow plan` prints them. There FOLDER stands for
the case's folder, CORPUS for that above it, which holds corpus_ops.py. In a block that is marked `escaped`, escapes as
in Python stand for bytes that an editor would change.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from attrs import define, field

from dsl.read_toml import read_graph
from executor.commands.arguments import add_overrides, add_selection
from executor.planning.session import selected

OPS = Path(__file__).parent / "corpus_ops.py"
PAGES = sorted((Path(__file__).parents[2] / "dsl" / "mistakes").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: ([\w.]+\.\w+))?( escaped)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT_NAMES = {"toml": "pipeline.toml", "python": "pipeline.py"}


@define
class Case:
    """A pipeline with mistakes: its files by name, arguments, and the lines that report them."""

    name: str
    files: dict[str, bytes] = field(factory=dict)
    arguments: list[str] = field(factory=list)
    expected: str = ""

    def write(self, corpus: Path) -> Path:
        """Write the case's files into a folder of their own in the corpus's folder, and return it."""
        folder = corpus / self.name
        folder.mkdir()
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        shutil.copy(OPS, corpus)
        return folder


def read_cases(page: Path) -> list[Case]:
    _, *sections = page.read_text().split("\n## ")
    cases = []
    for section in sections:
        name, _, text = section.partition("\n")
        case = Case(name)
        for language, file, escaped, body in BLOCK.findall(text):
            if language == "json":
                case.arguments = json.loads(body)
            elif language == "text" and not file:
                case.expected = body
            else:
                data = body.encode("ascii").decode("unicode_escape").encode("latin-1") if escaped else body.encode()
                case.files[file or DEFAULT_NAMES[language]] = data
        cases.append(case)
    return cases


CASES = [case for page in PAGES for case in read_cases(page)]


def read_case(case: Case) -> None:
    """Read the pipeline of a case, from within its folder. Raises PipelineError."""
    parser = argparse.ArgumentParser()
    add_overrides(parser)
    add_selection(parser)
    options = parser.parse_args(case.arguments)
    file = next(iter(case.files))
    selected(read_graph(Path(file), options.set, options.sweep), options.to, options.only)


def as_written(folder: Path, reported: str) -> str:
    """The reported text without this machine's folders."""
    return reported.replace(str(folder), "FOLDER").replace(str(folder.parent), "CORPUS")
