"""What an op may show in a report, and that showing is not computing."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from attrs import frozen

import ops.lib.report_sections
from dsl.convert import unstructure
from dsl.errors import ConfigError
from dsl.op import Artifact, field, op, op_of
from dsl.op_class import hook
from dsl.op_table import all_ops
from executor.results.op_hooks import section_from_json, section_to_json
from ops.lib.report_sections import Table


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="shown:run")
@frozen(kw_only=True)
class Shown:
    """Writes a text."""

    text: str = field(default="a", help="what to write")
    output = Text


def test_a_table_with_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="a table of 2 columns has the row"):
        Table(("a", "b"), [(1, 2), (1,)])


def test_every_built_in_op_shows_its_artifact() -> None:
    functions = {name: hook(spec, "report") for name, spec in all_ops().items()}
    assert [] == [name for name, function in functions.items() if function is None]
    assert all(map(callable, functions.values()))


def test_an_op_without_such_a_hook_shows_nothing() -> None:
    assert hook(op_of(Shown), "report") is None


def test_the_example_in_the_documentation_gives_sections_that_a_report_takes(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    code = text[text.index("        def report(folder") : text.index("The hook gets the folder")]
    names = {**vars(ops.lib.report_sections), "json": json, "Path": Path}
    exec(textwrap.dedent(code), names)
    summary = {"in": 3, "kept": 2, "dropped": {"too long": 1}, "splits": {"train": 2}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    sections = names["report"](tmp_path)
    assert ["samples", "tokens", "reach", "first rows"] == [section.title for section in sections]
    carried = [section_to_json(section, tmp_path) for section in sections]
    assert ["Account", "Table", "Finding", "Table"] == [section["kind"] for section in carried]
    assert unstructure(sections) == unstructure([section_from_json(section, tmp_path) for section in carried])
