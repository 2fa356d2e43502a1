"""The supported versions of SGLang: one list, which the project's files agree with, and what is said of others."""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from dsl.errors import DataError
from dsl.imports import PROJECT
from dsl.op import op_of
from ops.export_draft.op import ExportDraft
from ops.lib.sglang import version
from ops.lib.sglang.adapter import Adapter
from ops.lib.sglang.serve_command import PATCHED_TYPES
from ops.lib.sglang.version import INSTALL, VERSIONS, require_sglang

FOLDER = PROJECT / "ops" / "lib" / "sglang"


def public_names(file: Path) -> set[str]:
    """Functions and classes that a module defines, which this environment may not be able to import."""
    defined = (ast.FunctionDef, ast.ClassDef)
    nodes = ast.parse(file.read_text()).body
    return {node.name for node in nodes if isinstance(node, defined) and not node.name.startswith("_")}


def test_each_version_has_a_module_with_the_whole_interface_and_nothing_else():
    interface = {name for name in vars(Adapter) if not name.startswith("_")}
    modules = {file.stem: public_names(file) for file in FOLDER.glob("v0_*.py")}
    assert modules == {f"v{each.replace('.', '_')}": interface for each in VERSIONS}


def test_the_choices_of_the_export_the_extra_the_pins_and_the_launchers_are_of_these_versions():
    (choices, none) = typing.get_args(op_of(ExportDraft).fields["engine"].type)
    assert (typing.get_args(choices), none) == (tuple(f"sglang-{each}" for each in VERSIONS), type(None))
    project = tomli.loads((PROJECT / "pyproject.toml").read_text())["project"]
    (extra,) = map(Requirement, project["optional-dependencies"]["sglang"])
    assert list(extra.specifier.filter(f"0.5.{patch}" for patch in range(15, 30))) == list(VERSIONS)
    assert {f"pins-{each}.txt" for each in VERSIONS} == {
        file.name for file in (PROJECT / "tests" / "sglang").glob("pins-*.txt")
    }
    assert tuple(PATCHED_TYPES) == VERSIONS


@pytest.mark.parametrize(
    ("found", "engine", "message"),
    [
        (None, None, f"x needs SGLang 0.5.21 or 0.5.23, which is not installed: {INSTALL}"),
        (None, "sglang-0.5.21", "x needs SGLang 0.5.21, which is not installed: pip install sglang==0.5.21"),
        (
            "0.5.22",
            None,
            "x is written for SGLang 0.5.21 or 0.5.23, whose internals change with every release, and 0.5.22 is "
            "installed: pip install sglang==0.5.23",
        ),
        (
            "0.5.21",
            "sglang-0.5.23",
            'x needs SGLang 0.5.23, for which the draft was exported (engine = "sglang-0.5.23" of export_draft), and '
            '0.5.21 is installed: pip install sglang==0.5.23, or export the draft with engine = "sglang-0.5.21"',
        ),
        (
            "0.5.22",
            "sglang-0.5.21",
            'x needs SGLang 0.5.21, for which the draft was exported (engine = "sglang-0.5.21" of export_draft), and '
            "0.5.22 is installed: pip install sglang==0.5.21",
        ),
    ],
)
def test_a_version_that_cannot_work_is_refused_by_name_with_the_remedy(monkeypatch, found, engine, message):
    monkeypatch.setattr(version, "installed_version", lambda: found)
    with pytest.raises(DataError) as error:
        require_sglang("x", engine)
    assert message == str(error.value)


@pytest.mark.parametrize("found", VERSIONS)
def test_a_supported_version_is_accepted_for_an_export_that_names_none_or_it(monkeypatch, found):
    monkeypatch.setattr(version, "installed_version", lambda: found)
    assert found == require_sglang("x") == require_sglang("x", f"sglang-{found}")
